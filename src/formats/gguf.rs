//! Tensors of a GGUF file.
