//! The tests find fixtures where those of the root do.

use std::path::Path;

fn main() {
    let root =
        Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(3).expect("tools/emulated/laws lies in the checkout");
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-env=CARGO_MANIFEST_DIR={}", root.display());
}
