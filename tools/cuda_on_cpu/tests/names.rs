//! What the host launches and what the sources define are the same kernels.

use cuda_on_cpu::Kernel;
use dynamicinfer::device::kernel::{Function, MAX_ARGUMENTS};
use std::collections::BTreeSet;

#[test]
fn every_kernel_that_is_launched_exists_and_no_other() {
    let launched: BTreeSet<&str> = Function::names().collect();
    let of_tests = |name: &str| name.starts_with("broken_") || name.starts_with("whole_");
    let defined: BTreeSet<&str> = cuda_on_cpu::names().into_iter().filter(|name| !of_tests(name)).collect();
    assert_eq!(launched, defined);
    for name in launched {
        let arguments = Kernel::find(name).unwrap().arguments();
        assert!(arguments.len() <= MAX_ARGUMENTS, "{name} has {} arguments", arguments.len());
        assert!(arguments.iter().all(|&bytes| bytes <= 8), "{name} has an argument of more than a word");
    }
}
