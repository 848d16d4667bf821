//! Stands in for libFuzzer where the fuzz targets are compiled with the tests (`tests/fuzz_seeds.rs`).

/// Makes a target a function of its module.
#[macro_export]
macro_rules! fuzz_target {
    (|$bytes:ident: &[u8]| $body:expr) => {
        /// Takes one input.
        pub fn target($bytes: &[u8]) {
            $body
        }
    };
}
