//! Runs CUDA kernels on the CPU, from the sources that NVRTC compiles: what they compute, never how fast.
//!
//! Each thread of a thread block is a fiber (`shim/fibers.cpp`). [`Order`] turns the order of lanes, warps and blocks round:
//! a kernel whose result changes misses a barrier. Divergent barriers, masks that leave out their caller or name lanes that
//! are gone, deadlocks and writes behind a block's shared memory end a launch with a sentence.
//!
//! From C the same is `cuda_on_cpu_kernel` and `cuda_on_cpu_launch`.

mod stand_in;

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};

/// A kernel as the shim knows it.
#[derive(Clone, Copy)]
pub struct Kernel(*const c_void);

// SAFETY: it points to a constant of the C++ half.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

unsafe extern "C" {
    fn cuda_on_cpu_kernel(name: *const c_char) -> *const c_void;
    fn cuda_on_cpu_name(index: usize) -> *const c_char;
    fn cuda_on_cpu_argument(kernel: *const c_void, index: usize) -> usize;
    fn cuda_on_cpu_launch(
        kernel: *const c_void,
        grid: *const c_uint,
        block: *const c_uint,
        shared: usize,
        arguments: *const *const c_void,
        threads: c_uint,
        backward: c_int,
        message: *mut c_char,
        room: usize,
    ) -> c_int;
}

/// In which order fibers and blocks run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    Forward,
    Backward,
}

/// Names of all kernels, those of `tests/*.cu` included.
pub fn names() -> Vec<&'static str> {
    (0..)
        // SAFETY: any index may be asked for; the names are constants.
        .map_while(|i| unsafe { cuda_on_cpu_name(i).as_ref() })
        .map(|name| unsafe { CStr::from_ptr(name) }.to_str().expect("kernels have plain names"))
        .collect()
}

impl Kernel {
    pub fn find(name: &str) -> Option<Kernel> {
        let name = CString::new(name).ok()?;
        // SAFETY: a string that ends with zero.
        let kernel = unsafe { cuda_on_cpu_kernel(name.as_ptr()) };
        (!kernel.is_null()).then_some(Kernel(kernel))
    }

    /// Bytes of each argument.
    pub fn arguments(self) -> Vec<usize> {
        // SAFETY: the kernel is one of the shim's; any index may be asked for.
        (0..).map(|i| unsafe { cuda_on_cpu_argument(self.0, i) }).take_while(|&bytes| bytes > 0).collect()
    }

    /// Runs a grid and waits for its end. Each argument is in the low bytes of its word; `threads` share the blocks.
    ///
    /// # Errors
    /// What was wrong with the way in which its threads work together, or with the launch, in a sentence.
    ///
    /// # Panics
    /// If there are more or fewer arguments than the kernel has.
    ///
    /// # Safety
    /// As for a launch on a GPU: the kernel reads and writes what its arguments point to.
    pub unsafe fn launch(
        self,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: usize,
        arguments: &[u64],
        threads: usize,
        order: Order,
    ) -> Result<(), String> {
        assert_eq!(arguments.len(), self.arguments().len(), "arguments of the kernel");
        let pointers: Vec<*const c_void> = arguments.iter().map(|a| std::ptr::from_ref(a).cast()).collect();
        let mut message = [0u8; 512];
        // SAFETY: the kernel is one of the shim's and gets as many pointers as it has arguments; the rest is the caller's promise.
        let failed = unsafe {
            cuda_on_cpu_launch(
                self.0,
                grid.as_ptr(),
                block.as_ptr(),
                shared_bytes,
                pointers.as_ptr(),
                threads as c_uint,
                (order == Order::Backward) as c_int,
                message.as_mut_ptr().cast(),
                message.len(),
            )
        };
        if failed == 0 {
            return Ok(());
        }
        let text = CStr::from_bytes_until_nul(&message).expect("snprintf ends its text");
        Err(text.to_string_lossy().into_owned())
    }
}
