//! NVRTC's functions, by their symbols: "machine code" is the source behind a line that names the card, so that what was compiled
//! from what can be seen. Includes must be there; the rest of a source is g++'s to judge, which compiles the same text.
//!
//! `CUDA_ON_CPU_NVRTC=12.4` is its version; `CUDA_ON_CPU_COMPILED` a file that gets a line for each source that was compiled.

use super::append;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int};
use std::sync::{LazyLock, Mutex};

#[derive(Default)]
struct Program {
    name: String,
    source: String,
    headers: Vec<(String, String)>,
    log: Vec<u8>,
    code: Vec<u8>,
}

static PROGRAMS: LazyLock<Mutex<(u64, HashMap<u64, Program>)>> = LazyLock::new(Mutex::default);

const BEGINS: &str = "CUDA_ON_CPU machine code for sm_";
const INVALID_INPUT: c_int = 3;
const INVALID_PROGRAM: c_int = 4;
const COMPILATION: c_int = 6;

/// Whether this was compiled here for this card.
pub fn is_image(text: &[u8], arch: i32) -> bool {
    text.starts_with(format!("{BEGINS}{arch}\n").as_bytes())
}

fn with(program: u64, run: impl FnOnce(&mut Program) -> c_int) -> c_int {
    let mut programs = PROGRAMS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    programs.1.get_mut(&program).map_or(INVALID_PROGRAM, run)
}

/// # Safety
/// As NVRTC's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> c_int {
    let text = std::env::var("CUDA_ON_CPU_NVRTC").unwrap_or("12.4".into());
    let (first, second) = text.split_once('.').expect("CUDA_ON_CPU_NVRTC is like 12.4");
    // SAFETY: the caller gives places for them.
    unsafe { (*major, *minor) = (first.parse().expect("a number"), second.parse().expect("a number")) };
    0
}

/// # Safety
/// As NVRTC's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcCreateProgram(
    program: *mut u64,
    source: *const c_char,
    name: *const c_char,
    count: c_int,
    texts: *const *const c_char,
    names: *const *const c_char,
) -> c_int {
    if source.is_null() || name.is_null() || (count > 0 && (texts.is_null() || names.is_null())) {
        return INVALID_INPUT;
    }
    // SAFETY: the caller gives strings, and as many headers as it says.
    let text = |at: *const c_char| unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned();
    // SAFETY: as above.
    let header = |i: usize| unsafe { (text(*names.add(i)), text(*texts.add(i))) };
    let headers = (0..count as usize).map(header).collect();
    let made = Program { name: text(name), source: text(source), headers, ..Program::default() };
    let mut programs = PROGRAMS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    programs.0 += 1;
    let id = programs.0;
    programs.1.insert(id, made);
    // SAFETY: the caller gives a place for it.
    unsafe { *program = id };
    0
}

/// # Safety
/// As NVRTC's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcDestroyProgram(program: *mut u64) -> c_int {
    let mut programs = PROGRAMS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    // SAFETY: the caller gives a program.
    if programs.1.remove(unsafe { &*program }).is_some() { 0 } else { INVALID_PROGRAM }
}

/// # Safety
/// As NVRTC's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvrtcCompileProgram(program: u64, count: c_int, options: *const *const c_char) -> c_int {
    // SAFETY: the caller gives as many strings as it says.
    let option = |i: usize| unsafe { CStr::from_ptr(*options.add(i)) }.to_string_lossy().into_owned();
    let options: Vec<String> = (0..count as usize).map(option).collect();
    with(program, |program| {
        let arch = options.iter().find_map(|o| o.strip_prefix("--gpu-architecture=sm_")?.parse::<u32>().ok());
        let texts = std::iter::once(&program.source).chain(program.headers.iter().map(|(_, text)| text));
        let includes = texts.flat_map(|text| text.lines()).filter_map(|line| line.trim().strip_prefix("#include "));
        let missing = includes
            .map(|name| name.trim_matches(['"', '<', '>', ' ']))
            .find(|name| !program.headers.iter().any(|(known, _)| known == name));
        let (Some(arch), None) = (arch, missing) else {
            program.log = format!("{}: options {options:?}, missing {missing:?}\0", program.name).into_bytes();
            return COMPILATION;
        };
        if let Ok(path) = std::env::var("CUDA_ON_CPU_COMPILED") {
            append(path.as_ref(), &program.name);
        }
        program.code = format!("{BEGINS}{arch}\n{}\0", program.source).into_bytes();
        0
    })
}

macro_rules! results {
    ($($size:ident $content:ident $field:ident;)*) => {$(
        /// # Safety
        /// As NVRTC's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $size(program: u64, bytes: *mut usize) -> c_int {
            with(program, |program| {
                // SAFETY: the caller gives a place for it.
                unsafe { *bytes = program.$field.len() };
                0
            })
        }

        /// # Safety
        /// As NVRTC's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $content(program: u64, to: *mut u8) -> c_int {
            with(program, |program| {
                // SAFETY: the caller gives as many bytes as it was told.
                unsafe { to.copy_from_nonoverlapping(program.$field.as_ptr(), program.$field.len()) };
                0
            })
        }
    )*};
}

results! {
    nvrtcGetProgramLogSize nvrtcGetProgramLog log;
    nvrtcGetCUBINSize nvrtcGetCUBIN code;
}
