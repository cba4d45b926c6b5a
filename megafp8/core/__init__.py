"""The GPT model: transformer parts, tensor-parallel layers, and the model assembled from them."""
