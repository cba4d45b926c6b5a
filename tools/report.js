// Tooltips of charts and heat maps, and runs shown or hidden by the boxes at the top. Without it the page is still whole.
"use strict";
const tip = document.getElementById("tip");

document.querySelectorAll("input[data-run]").forEach((box) => {
  box.addEventListener("change", () => {
    document.querySelectorAll(`[data-run="${box.dataset.run}"]:not(input)`).forEach((part) => {
      part.classList.toggle("off", !box.checked);
    });
  });
});

const shown = (run) => {
  const box = document.querySelector(`input[data-run="${run}"]`);
  return !box || box.checked;
};

const digits = (value) => (Math.abs(value) >= 1e-3 && Math.abs(value) < 1e6) || value === 0
  ? String(+value.toPrecision(5)) : value.toExponential(3);

function place(event, rows) {
  tip.replaceChildren(...rows.map(([text, name]) => {
    const row = document.createElement("div");
    if (name !== undefined) row.className = `row ${name}`;
    row.textContent = text;
    return row;
  }));
  tip.hidden = false;
  const left = event.clientX + 16 + tip.offsetWidth > innerWidth ? event.clientX - 16 - tip.offsetWidth : event.clientX + 16;
  const top = Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 4);
  tip.style.left = `${Math.max(0, left)}px`;
  tip.style.top = `${Math.max(0, top)}px`;
}

function at(svg, event) {
  const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
  return [(event.clientX - box.left) / box.width * view.width, (event.clientY - box.top) / box.height * view.height];
}

function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle; else high = middle;
  }
  return Math.abs(xs[low] - x) <= Math.abs(xs[high] - x) ? low : high;
}

function lines(svg, data) {
  const cursor = document.createElementNS("http://www.w3.org/2000/svg", "path");
  cursor.setAttribute("class", "cursor");
  svg.append(cursor);
  const [low, high, start, stop] = data.x;
  svg.addEventListener("pointermove", (event) => {
    const [px] = at(svg, event);
    if (px < start - 4 || px > stop + 4) return leave();
    const x = low + (px - start) / (stop - start) * (high - low);
    const found = data.curves.filter((curve) => shown(curve.run)).map((curve) => [curve, nearest(curve.x, x)])
      .filter(([curve, i]) => Math.abs(curve.x[i] - x) <= Math.max(1, (high - low) / 30));
    if (!found.length) return leave();
    const told = found.map(([curve, i]) => curve.x[i])
      .reduce((best, other) => (Math.abs(other - x) < Math.abs(best - x) ? other : best));
    const rows = found.map(([curve, i]) => {
      const value = curve.y[i] === null ? "not finite" : digits(curve.y[i]);
      return [`${curve.name}${curve.x[i] === told ? "" : ` (at ${curve.x[i]})`}: ${value}`, `c${curve.run % 8}`];
    });
    cursor.setAttribute("d", `M${start + (told - low) / (high - low) * (stop - start)} ${data.y[3]}V${data.y[2]}`);
    place(event, [[`iteration ${told}`], ...rows]);
  });
  function leave() { cursor.removeAttribute("d"); tip.hidden = true; }
  svg.addEventListener("pointerleave", leave);
}

function heat(svg, data) {
  svg.addEventListener("pointermove", (event) => {
    const [px, py] = at(svg, event);
    for (const panel of data.panels) {
      const [x, y, wide, height] = panel.box;
      const column = Math.floor((px - x) / wide * panel.looks.length), row = Math.floor((py - y) / height * data.rows.length);
      if (column < 0 || column >= panel.looks.length || row < 0 || row >= data.rows.length) continue;
      const value = panel.values[row][column];
      return place(event, [
        [`${data.rows[row]}, ${panel.role}`], [`iteration ${panel.looks[column]}`],
        [value === null ? "not measured: not in FP8 then, or no error" : `${digits(value)} ${data.unit}`],
      ]);
    }
    tip.hidden = true;
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; });
}

document.querySelectorAll("figure").forEach((figure) => {
  const numbers = figure.querySelector('script[type="application/json"]');
  if (!numbers) return;
  const data = JSON.parse(numbers.textContent);
  ({ lines, heat })[data.kind](figure.querySelector("svg.chart"), data);
});
