//! The driver's functions, found by name in the library that cudarc finds when the program runs.
//!
//! A table of our own over cudarc's library and types. cudarc's own functions end the program where a symbol is missing, and read
//! a return code as one of the enum's values, which a driver newer than the bindings need not return.

use cudarc::driver::sys;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};

pub use sys::{
    CUDA_KERNEL_NODE_PARAMS_v2 as KernelNode, CUDA_MEMCPY3D_v2 as MemcpyNode, CUcontext, CUevent, CUfunction, CUgraph,
    CUgraphExec, CUgraphNode, CUmemAccessDesc, CUmemAllocationProp, CUmemorytype as MemoryType, CUmodule, CUstream,
};

/// What a function returns; 0 is success. Their meaning is the driver API's `CUresult`.
pub type Code = u32;
pub const SUCCESS: Code = 0;
pub const OUT_OF_MEMORY: Code = 2;
pub const INVALID_IMAGE: Code = 200;
pub const NO_BINARY_FOR_GPU: Code = 209;
pub const NOT_READY: Code = 600;

/// An address in device memory.
pub type Address = u64;

macro_rules! functions {
    ($(#[$about:meta])* $table:ident: $($name:ident = $symbol:literal ($($arg:ty),*);)*) => {
        $(#[$about])*
        pub struct $table { $(pub $name: unsafe extern "C" fn($($arg),*) -> Code,)* }

        impl $table {
            /// # Safety
            /// The library is there: [`is_present`].
            ///
            /// # Errors
            /// The first symbol that it lacks.
            unsafe fn load() -> Result<$table, &'static str> {
                // SAFETY: the caller's promise: cudarc finds the library.
                let library = unsafe { sys::culib() };
                // SAFETY: the driver API declares each symbol as a function of these types.
                Ok($table { $($name: *unsafe { library.get($symbol.as_bytes()) }.map_err(|_| $symbol)?,)* })
            }
        }
    };
}

functions! {
    /// The driver's functions that are used, by their symbols in the driver API.
    Functions:
    init = "cuInit" (c_uint);
    version = "cuDriverGetVersion" (*mut c_int);
    error_name = "cuGetErrorName" (Code, *mut *const c_char);
    error_string = "cuGetErrorString" (Code, *mut *const c_char);
    device_count = "cuDeviceGetCount" (*mut c_int);
    device = "cuDeviceGet" (*mut c_int, c_int);
    device_name = "cuDeviceGetName" (*mut c_char, c_int, c_int);
    device_attribute = "cuDeviceGetAttribute" (*mut c_int, c_uint, c_int);
    context_retain = "cuDevicePrimaryCtxRetain" (*mut CUcontext, c_int);
    context_release = "cuDevicePrimaryCtxRelease_v2" (c_int);
    context_set = "cuCtxSetCurrent" (CUcontext);
    priorities = "cuCtxGetStreamPriorityRange" (*mut c_int, *mut c_int);
    memory_info = "cuMemGetInfo_v2" (*mut usize, *mut usize);
    alloc = "cuMemAlloc_v2" (*mut Address, usize);
    free = "cuMemFree_v2" (Address);
    address_reserve = "cuMemAddressReserve" (*mut Address, usize, usize, Address, c_ulonglong);
    address_free = "cuMemAddressFree" (Address, usize);
    chunk_create = "cuMemCreate" (*mut c_ulonglong, usize, *const CUmemAllocationProp, c_ulonglong);
    chunk_release = "cuMemRelease" (c_ulonglong);
    chunk_map = "cuMemMap" (Address, usize, usize, c_ulonglong, c_ulonglong);
    chunk_unmap = "cuMemUnmap" (Address, usize);
    chunk_access = "cuMemSetAccess" (Address, usize, *const CUmemAccessDesc, usize);
    granularity = "cuMemGetAllocationGranularity" (*mut usize, *const CUmemAllocationProp, c_uint);
    host_alloc = "cuMemHostAlloc" (*mut *mut c_void, usize, c_uint);
    host_free = "cuMemFreeHost" (*mut c_void);
    host_register = "cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
    host_unregister = "cuMemHostUnregister" (*mut c_void);
    copy_in = "cuMemcpyHtoDAsync_v2" (Address, *const c_void, usize, CUstream);
    copy_out = "cuMemcpyDtoHAsync_v2" (*mut c_void, Address, usize, CUstream);
    copy_within = "cuMemcpyDtoDAsync_v2" (Address, Address, usize, CUstream);
    set_bytes = "cuMemsetD8Async" (Address, u8, usize, CUstream);
    stream_create = "cuStreamCreateWithPriority" (*mut CUstream, c_uint, c_int);
    stream_destroy = "cuStreamDestroy_v2" (CUstream);
    stream_wait = "cuStreamWaitEvent" (CUstream, CUevent, c_uint);
    stream_query = "cuStreamQuery" (CUstream);
    event_create = "cuEventCreate" (*mut CUevent, c_uint);
    event_destroy = "cuEventDestroy_v2" (CUevent);
    event_record = "cuEventRecord" (CUevent, CUstream);
    event_query = "cuEventQuery" (CUevent);
    event_elapsed = "cuEventElapsedTime" (*mut f32, CUevent, CUevent);
    module_load = "cuModuleLoadData" (*mut CUmodule, *const c_void);
    module_unload = "cuModuleUnload" (CUmodule);
    function = "cuModuleGetFunction" (*mut CUfunction, CUmodule, *const c_char);
    host_address = "cuMemHostGetDevicePointer_v2" (*mut Address, *mut c_void, c_uint);
    launch = "cuLaunchKernel" (
        CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void, *mut *mut c_void
    );
}

functions! {
    /// The driver's functions for graphs.
    GraphFunctions:
    create = "cuGraphCreate" (*mut CUgraph, c_uint);
    destroy = "cuGraphDestroy" (CUgraph);
    add_kernel = "cuGraphAddKernelNode_v2" (*mut CUgraphNode, CUgraph, *const CUgraphNode, usize, *const KernelNode);
    add_copy = "cuGraphAddMemcpyNode" (
        *mut CUgraphNode, CUgraph, *const CUgraphNode, usize, *const MemcpyNode, CUcontext
    );
    instantiate = "cuGraphInstantiateWithFlags" (*mut CUgraphExec, CUgraph, c_ulonglong);
    set_kernel = "cuGraphExecKernelNodeSetParams_v2" (CUgraphExec, CUgraphNode, *const KernelNode);
    set_copy = "cuGraphExecMemcpyNodeSetParams" (CUgraphExec, CUgraphNode, *const MemcpyNode, CUcontext);
    launch = "cuGraphLaunch" (CUgraphExec, CUstream);
    exec_destroy = "cuGraphExecDestroy" (CUgraphExec);
}

/// `cuMemcpyBatchAsync` as CUDA 12.8 has it: targets, sources, bytes, count, attributes, the first copy that each attribute is for,
/// their count, where the first copy goes that failed, stream.
pub type CopyBatch = unsafe extern "C" fn(
    *const Address,
    *const Address,
    *const usize,
    usize,
    *const CopyAttributes,
    *const usize,
    usize,
    *mut usize,
    CUstream,
) -> Code;

/// `CUmemcpyAttributes`.
#[repr(C)]
pub struct CopyAttributes {
    /// 1: in the order of the stream.
    pub source_order: c_uint,
    /// Kind and number of each; 0 for no hint.
    pub source_hint: [c_int; 2],
    pub target_hint: [c_int; 2],
    pub flags: c_uint,
}

/// Whether a driver library can be loaded at all. Nothing else of it may be used before this has returned `true`.
pub fn is_present() -> bool {
    // SAFETY: loading the driver runs its initialisers, which is what a program that asks for a device wants.
    unsafe { sys::is_culib_present() }
}

/// A function of the driver refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What was being done: "take memory".
    pub doing: &'static str,
    /// The driver's code.
    pub code: Code,
    /// The driver's name and words for the code.
    pub name: String,
    pub text: String,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the driver could not {}: {} ({}, {})", self.doing, self.text, self.name, self.code)
    }
}

/// Advice for a user about an error code; general advice for most codes.
pub fn remedy(code: Code) -> &'static str {
    match code {
        2 => "close what else uses the card (nvidia-smi shows it), or give a smaller --vram",
        34 => {
            "the library found is the toolkit's stub: take it out of LD_LIBRARY_PATH so that the driver's own is found"
        }
        36 | 222 | 803 | 804 => {
            "the driver's parts do not fit together: restart the machine after a driver update, or update it"
        }
        46 | 102 | 805..=810 => {
            "another process holds the card alone, or it is in prohibited mode: look at nvidia-smi -q -d COMPUTE"
        }
        100 => "check that nvidia-smi lists a card, and that CUDA_VISIBLE_DEVICES does not hide it",
        101 => "check that nvidia-smi lists this card",
        200 | 209 | 218 | 221 | 223 => "update the driver, or install NVRTC of CUDA 12 or newer",
        214 | 220 => "the card's memory had an error that cannot be corrected: reset the card or restart the machine",
        700 | 714..=719 => {
            "this is a bug of a kernel or a failing card: run again, and report it with `dynamicinfer doctor`'s answer"
        }
        702 => "a kernel ran longer than the system allows a card that drives a screen",
        _ => "run again; if it comes back, nvidia-smi and the kernel's log (dmesg, Xid) say more",
    }
}

/// The driver: its functions, and methods that turn their codes into errors.
pub struct Driver {
    /// The functions that every supported driver has.
    pub f: Functions,
    /// Copies many blocks by one call; drivers for CUDA 12.8 and newer have it.
    pub copy_batch: Option<CopyBatch>,
    /// By their documents, all supported drivers have these; without them kernels are started one by one.
    pub graphs: Option<GraphFunctions>,
}

impl Driver {
    /// # Safety
    /// The library is there: [`is_present`].
    ///
    /// # Errors
    /// The first symbol that it lacks.
    pub unsafe fn load() -> Result<Driver, &'static str> {
        // SAFETY: the caller's promise.
        let f = unsafe { Functions::load()? };
        // SAFETY: as above; CUDA 12.8 declares this symbol so, and newer drivers keep it beside its second version.
        let copy_batch = unsafe { sys::culib().get(b"cuMemcpyBatchAsync") }.ok().map(|symbol| *symbol);
        // SAFETY: the caller's promise.
        let graphs = unsafe { GraphFunctions::load() }.ok();
        Ok(Driver { f, copy_batch, graphs })
    }

    /// `code` as an error, if it is one.
    pub fn check(&self, doing: &'static str, code: Code) -> Result<(), Refusal> {
        if code == SUCCESS { Ok(()) } else { Err(self.refusal(doing, code)) }
    }

    /// The error for `code`, which is not success, with the driver's own words.
    pub fn refusal(&self, doing: &'static str, code: Code) -> Refusal {
        let words = |ask: unsafe extern "C" fn(Code, *mut *const c_char) -> Code| {
            let mut text = std::ptr::null();
            // SAFETY: the driver writes a pointer to a string of its own, which it never frees, or null.
            let known = unsafe { ask(code, &mut text) } == SUCCESS && !text.is_null();
            // SAFETY: as above; it ends with a zero.
            known.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        };
        let name = words(self.f.error_name).unwrap_or_else(|| "a code that this driver has no name for".into());
        let text = words(self.f.error_string).unwrap_or_else(|| "unknown error".into());
        Refusal { doing, code, name, text }
    }

    /// The newest CUDA that the driver speaks: 12020 is 12.2.
    pub fn version(&self) -> Result<u32, Refusal> {
        let mut version = 0;
        // SAFETY: it writes one number.
        self.check("tell its version", unsafe { (self.f.version)(&mut version) })?;
        Ok(version as u32)
    }

    /// A property of a card, by its number in `CUdevice_attribute`.
    pub fn attribute(&self, card: c_int, attribute: sys::CUdevice_attribute) -> Result<i32, Refusal> {
        let mut value = 0;
        // SAFETY: it writes one number.
        let code = unsafe { (self.f.device_attribute)(&mut value, attribute as c_uint, card) };
        self.check("tell the card's properties", code)?;
        Ok(value)
    }

    /// The name that the driver has for a card.
    pub fn card_name(&self, card: c_int) -> Result<String, Refusal> {
        let mut name = [0 as c_char; 128];
        // SAFETY: it writes at most this many characters.
        let code = unsafe { (self.f.device_name)(name.as_mut_ptr(), name.len() as c_int, card) };
        self.check("tell the card's name", code)?;
        name[name.len() - 1] = 0;
        // SAFETY: the last character is a zero.
        Ok(unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned())
    }

    /// Bytes that are free on the card of the current context, and all of them.
    pub fn memory(&self) -> Result<(u64, u64), Refusal> {
        let (mut free, mut total) = (0usize, 0usize);
        // SAFETY: it writes two numbers.
        self.check("tell how much memory is free", unsafe { (self.f.memory_info)(&mut free, &mut total) })?;
        Ok((free as u64, total as u64))
    }
}
