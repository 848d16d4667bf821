//! Only tests are here: the laws of the root, on the library of `tools/emulated`.
