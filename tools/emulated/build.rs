//! Compiles the library with every vector instruction in plain Rust.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cfg=emulated");
}
