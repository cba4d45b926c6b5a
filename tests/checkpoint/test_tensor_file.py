"""Our safetensors files, read by the library."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from megafp8.checkpoint.tensor_file import (
    DTYPES,
    DamagedFileError,
    FileRecord,
    check_file,
    open_tensors,
    write_tensors,
)


def sample():
    out = {f"x.{name}": torch.randint(0, 2, (5, 3)).to(dtype) for name, dtype in DTYPES.items()}
    out |= {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "one": torch.ones(1, dtype=torch.uint8)}
    out["transposed"] = torch.randn(4, 6).t()
    return out


def test_the_library_reads_every_dtype_and_shape(tmp_path):
    tensors = sample()
    record = write_tensors(tmp_path / "a.safetensors", tensors)
    check_file(tmp_path / "a.safetensors", record)
    loaded = load_file(tmp_path / "a.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert loaded[name].shape == tensor.shape, name
        same = loaded[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        assert torch.equal(*same), name
    with safe_open(tmp_path / "a.safetensors", framework="pt") as f:
        assert torch.equal(f.get_slice("transposed")[2:5, 1:3], tensors["transposed"][2:5, 1:3])


def test_every_tensor_is_aligned_to_its_elements(tmp_path):
    """A reader may map the file and use the bytes where they are."""
    path = tmp_path / "a.safetensors"
    tensors = sample()
    write_tensors(path, tensors)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    end = 0
    for name, entry in json.loads(content[8 : 8 + length]).items():
        start, stop = entry["data_offsets"]
        assert start == end
        assert start % tensors[name].element_size() == 0, name
        end = stop
    assert 8 + length + end == len(content)


def test_every_changed_byte_and_every_length_is_noticed(tmp_path):
    path = tmp_path / "a.safetensors"
    record = write_tensors(path, {"a": torch.arange(20.0)})
    good = path.read_bytes()
    for i in range(0, len(good), 7):
        path.write_bytes(good[:i] + bytes([good[i] ^ 4]) + good[i + 1 :])
        with pytest.raises(DamagedFileError, match="a.safetensors is damaged: checksum"):
            check_file(path, record)
    path.write_bytes(good[:-1])
    with pytest.raises(DamagedFileError, match="bytes"):
        check_file(path, record)
    path.unlink()
    with pytest.raises(DamagedFileError, match="a.safetensors is missing"):
        check_file(path, record)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        b"\xff\xff\xff\xff\xff\xff\xff\x7f{}",
        (10**6).to_bytes(8, "little") + b"{}",
        b"\x02" + b"\0" * 7 + b"[]",
    ],
)
def test_files_that_are_no_safetensors_are_named(tmp_path, content):
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(DamagedFileError, match="a.safetensors"), open_tensors(tmp_path / "a.safetensors"):
        pass


def test_a_file_that_differs_from_the_index_is_noticed(tmp_path):
    write_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(3, 4)})
    with open_tensors(tmp_path / "a.safetensors") as reader:
        reader.check("a", torch.float32, (3, 4))
        for key, dtype, shape in [
            ("b", torch.float32, (3, 4)),
            ("a", torch.int32, (3, 4)),
            ("a", torch.float32, (4, 3)),
        ]:
            with pytest.raises(DamagedFileError, match="a.safetensors"):
                reader.check(key, dtype, shape)


def test_an_existing_file_is_never_overwritten(tmp_path):
    write_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(3)})
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / "a.safetensors", {"a": torch.zeros(3)})


def test_records_compare_by_value():
    assert FileRecord(1, 2) == FileRecord(1, 2) != FileRecord(1, 3)
