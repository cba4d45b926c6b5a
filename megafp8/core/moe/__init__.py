"""Mixture of experts: router -> permutation -> experts -> weighted sum, and shared experts beside them."""
