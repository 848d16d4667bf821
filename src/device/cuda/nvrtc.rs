//! NVRTC, NVIDIA's run-time compiler, if the machine has it.
//!
//! It is loaded here and not by cudarc, which looks for the names of one major version only: a user may have another.

use libloading::Library;
use std::ffi::{CString, c_char, c_int};
use std::path::PathBuf;
use std::ptr::null;

/// Versions that make machine code of every kernel, as `tools/nvrtc_check.py --all-versions` has shown; that check refuses a list that
/// differs from its own.
pub const SHOWN: [(u32, u32); 14] = [
    (12, 1),
    (12, 2),
    (12, 3),
    (12, 4),
    (12, 5),
    (12, 6),
    (12, 8),
    (12, 9),
    (13, 0),
    (13, 1),
    (13, 2),
    (13, 3),
    (13, 4),
    (13, 5),
];

type Program = *mut std::ffi::c_void;
type Get<T> = unsafe extern "C" fn(Program, *mut T) -> c_int;

/// The compiler's functions; all return 0 for success.
pub struct Nvrtc {
    /// Major and minor: 12.1 is (12, 1).
    pub version: (u32, u32),
    create: unsafe extern "C" fn(
        *mut Program,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    destroy: unsafe extern "C" fn(*mut Program) -> c_int,
    compile: unsafe extern "C" fn(Program, c_int, *const *const c_char) -> c_int,
    log_size: Get<usize>,
    log: Get<c_char>,
    cubin_size: Get<usize>,
    cubin: Get<c_char>,
    /// The library that the functions are in.
    _library: Library,
}

impl Nvrtc {
    /// The first NVRTC that can be loaded: from `files`, then by the names that it has in CUDA 13 and 12.
    pub fn find(files: &[PathBuf]) -> Option<Nvrtc> {
        let names = ["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"].map(PathBuf::from);
        files.iter().chain(&names).find_map(Nvrtc::load)
    }

    /// Whether a driver takes its machine code: it cannot take that of a compiler that is a major version ahead.
    pub fn fits(&self, driver_version: u32) -> bool {
        self.version.0 <= driver_version / 1000
    }

    fn load(name: &PathBuf) -> Option<Nvrtc> {
        // SAFETY: the compiler's initialisers set up nothing but itself.
        let library = unsafe { Library::new(name) }.ok()?;
        macro_rules! function {
            // SAFETY: NVRTC declares each symbol as a function of the type that its field has.
            ($symbol:literal) => {
                *unsafe { library.get($symbol.as_bytes()) }.ok()?
            };
        }
        let ask: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int = function!("nvrtcVersion");
        let (mut major, mut minor) = (0, 0);
        // SAFETY: it writes two numbers.
        if unsafe { ask(&mut major, &mut minor) } != 0 {
            return None;
        }
        Some(Nvrtc {
            version: (major as u32, minor as u32),
            create: function!("nvrtcCreateProgram"),
            destroy: function!("nvrtcDestroyProgram"),
            compile: function!("nvrtcCompileProgram"),
            log_size: function!("nvrtcGetProgramLogSize"),
            log: function!("nvrtcGetProgramLog"),
            cubin_size: function!("nvrtcGetCUBINSize"),
            cubin: function!("nvrtcGetCUBIN"),
            _library: library,
        })
    }

    /// Compiles a source to machine code; `headers` are those that it may include, as `(name, text)`.
    ///
    /// # Errors
    /// The compiler's messages.
    pub fn compile(
        &self,
        name: &str,
        source: &str,
        headers: &[(&str, &str)],
        options: &[String],
    ) -> Result<Vec<u8>, String> {
        let c = |text: &str| CString::new(text).map_err(|_| format!("{name} has a zero in its text"));
        let all = |texts: &mut dyn Iterator<Item = &str>| texts.map(c).collect::<Result<Vec<CString>, String>>();
        let (title, source) = (c(name)?, c(source)?);
        let names = all(&mut headers.iter().map(|h| h.0))?;
        let texts = all(&mut headers.iter().map(|h| h.1))?;
        let options = all(&mut options.iter().map(String::as_str))?;
        let pointers = |of: &[CString]| of.iter().map(|c| c.as_ptr()).collect::<Vec<_>>();
        let (names_at, texts_at, options_at) = (pointers(&names), pointers(&texts), pointers(&options));
        let mut program = std::ptr::null_mut();
        let list = |of: &Vec<*const c_char>| if of.is_empty() { null() } else { of.as_ptr() };
        // SAFETY: strings and lists outlive the program, which is destroyed below.
        let made = unsafe {
            let (texts, names) = (list(&texts_at), list(&names_at));
            (self.create)(&mut program, source.as_ptr(), title.as_ptr(), headers.len() as c_int, texts, names)
        };
        if made != 0 {
            return Err(format!("the compiler does not take {name}: error {made}"));
        }
        // SAFETY: the program is there, and the list is as long as it says.
        let compiled = unsafe { (self.compile)(program, options.len() as c_int, list(&options_at)) };
        let answer = match compiled {
            0 => self.get(program, self.cubin_size, self.cubin).ok_or_else(|| format!("no machine code of {name}")),
            code => {
                let log = self.get(program, self.log_size, self.log).unwrap_or_default();
                Err(format!("{name}: error {code}: {}", String::from_utf8_lossy(&log).trim_end_matches('\0').trim()))
            }
        };
        // SAFETY: made above, and not used again.
        unsafe { (self.destroy)(&mut program) };
        answer
    }

    fn get(&self, program: Program, size: Get<usize>, content: Get<c_char>) -> Option<Vec<u8>> {
        let mut bytes = 0;
        // SAFETY: it writes one number.
        if unsafe { size(program, &mut bytes) } != 0 {
            return None;
        }
        let mut out = vec![0u8; bytes];
        // SAFETY: it writes as many bytes as it said.
        (unsafe { content(program, out.as_mut_ptr().cast()) } == 0).then_some(out)
    }
}
