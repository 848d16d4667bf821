//! Makes functions of a card from the embedded sources: NVRTC compiles them for the card at first use, and the result is kept on disk;
//! or the driver compiles the embedded PTX.

use super::driver::{CUfunction, CUmodule, Code, Driver, INVALID_IMAGE, NO_BINARY_FOR_GPU, Refusal};
use super::nvrtc::Nvrtc;
use crate::device::kernel::{Function, HEADERS, Launch, MAX_ARGUMENTS, SOURCES, Source};
use crate::formats::temporary;
use lzma_rust2::LzmaReader;
use std::ffi::{CString, c_void};
use std::io::Read;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_128;

/// Options that `kernels/` is written for: without fused multiply-add each operation rounds once.
const OPTIONS: [&str; 2] = ["--std=c++17", "--fmad=false"];

/// Where kernels may come from.
#[derive(Clone, Debug, Default)]
pub struct Delivery {
    /// Where machine code is kept; `None` compiles each time.
    pub cache: Option<PathBuf>,
    /// Files to try as NVRTC, before the names that the system knows it by; `None` takes the embedded PTX and no NVRTC.
    pub nvrtc: Option<Vec<PathBuf>>,
}

impl Delivery {
    /// Major and minor of the NVRTC that is found.
    pub fn nvrtc_version(&self) -> Option<(u32, u32)> {
        self.compiler().map(|nvrtc| nvrtc.version)
    }

    /// Whether kernels have to be compiled for a card that come from the cache the next time; it takes a quarter of a minute. What the driver
    /// compiles it keeps by itself, and does not say.
    pub fn compiles(&self, arch: u32, driver_version: u32) -> bool {
        let nvrtc = self.compiler().filter(|nvrtc| nvrtc.fits(driver_version));
        nvrtc.is_some_and(|nvrtc| {
            let compiler = Compiler { nvrtc: &nvrtc, arch, cache: self.cache.as_deref() };
            SOURCES.iter().any(|source| compiler.path(source).is_none_or(|path| !path.exists()))
        })
    }

    fn compiler(&self) -> Option<Nvrtc> {
        self.nvrtc.as_deref().and_then(Nvrtc::find)
    }
}

/// How the kernels came to be, for people: "compiled by NVRTC 12.4 for sm_86".
pub type Origin = String;

/// The kernels that are loaded on a card: modules, and functions by [`Function::index`].
pub struct Kernels {
    /// In the order of [`SOURCES`].
    modules: Vec<CUmodule>,
    functions: Vec<CUfunction>,
    /// How they came to be.
    pub origin: Origin,
}

impl Kernels {
    /// `arch` is the card's compute capability, 86 for 8.6; `driver_version` as the driver tells it, 12020 for 12.2.
    ///
    /// # Errors
    /// Why the driver has refused the embedded PTX, the last resort.
    pub fn load(driver: &Driver, delivery: &Delivery, arch: u32, driver_version: u32) -> Result<Kernels, Refusal> {
        let nvrtc = delivery.compiler().filter(|nvrtc| nvrtc.fits(driver_version));
        if let Some(nvrtc) = &nvrtc {
            let compiler = Compiler { nvrtc, arch, cache: delivery.cache.as_deref() };
            match compiler.load(driver) {
                Ok(kernels) => return Ok(kernels),
                Err(why) => tracing::warn!("the kernels could not be compiled, the embedded ones are taken: {why}"),
            }
        }
        let add =
            |kernels: &mut Kernels, source: &Source| kernels.add(driver, embedded_ptx(source).as_bytes_with_nul());
        Kernels::of("from the embedded PTX".into(), driver, add)
    }

    /// The kernels that `add` loads for each source, with all functions found; if something fails, what was loaded is unloaded.
    fn of<E: From<Refusal>>(
        origin: Origin,
        driver: &Driver,
        add: impl Fn(&mut Kernels, &Source) -> Result<(), E>,
    ) -> Result<Kernels, E> {
        let mut kernels = Kernels { modules: Vec::new(), functions: Vec::new(), origin };
        let added = SOURCES.iter().try_for_each(|source| add(&mut kernels, source));
        match added.and_then(|()| Ok(kernels.find(driver)?)) {
            Ok(()) => Ok(kernels),
            Err(error) => {
                kernels.unload(driver);
                Err(error)
            }
        }
    }

    fn add(&mut self, driver: &Driver, image: &[u8]) -> Result<(), Refusal> {
        let mut module = std::ptr::null_mut();
        // SAFETY: an image is PTX that ends with a zero, or machine code that tells its own length.
        let code = unsafe { (driver.f.module_load)(&mut module, image.as_ptr().cast()) };
        driver.check("load the kernels", code)?;
        self.modules.push(module);
        Ok(())
    }

    fn find(&mut self, driver: &Driver) -> Result<(), Refusal> {
        for (source, &module) in SOURCES.iter().zip(&self.modules) {
            for name in source.functions() {
                let symbol = CString::new(name).expect("a kernel's name has no zero");
                let mut function = std::ptr::null_mut();
                // SAFETY: the module is there; it writes a handle.
                let code = unsafe { (driver.f.function)(&mut function, module, symbol.as_ptr()) };
                driver.check("find a kernel in its module", code)?;
                self.functions.push(function);
            }
        }
        Ok(())
    }

    /// The driver's handle of a function.
    pub fn function(&self, function: Function) -> CUfunction {
        self.functions[function.index()]
    }

    /// Unloads all modules; nothing may be running any more.
    pub fn unload(self, driver: &Driver) {
        for module in self.modules {
            // SAFETY: loaded here, and nothing runs any more.
            unsafe { (driver.f.module_unload)(module) };
        }
    }
}

/// Pointers to a launch's arguments, in the form that the driver takes; it copies the arguments at once.
pub fn words(launch: &Launch) -> [*mut c_void; MAX_ARGUMENTS] {
    let mut words = [std::ptr::null_mut(); MAX_ARGUMENTS];
    for (pointer, word) in words.iter_mut().zip(launch.arguments()) {
        *pointer = std::ptr::from_ref(word).cast_mut().cast();
    }
    words
}

/// NVRTC for one card.
struct Compiler<'a> {
    nvrtc: &'a Nvrtc,
    arch: u32,
    cache: Option<&'a Path>,
}

/// Why compiling has failed, for a warning; the embedded PTX is then used.
struct Why(String);

impl From<Refusal> for Why {
    fn from(refusal: Refusal) -> Why {
        Why(refusal.to_string())
    }
}

impl Compiler<'_> {
    fn load(&self, driver: &Driver) -> Result<Kernels, String> {
        let (major, minor) = self.nvrtc.version;
        let origin = format!("compiled by NVRTC {major}.{minor} for sm_{}", self.arch);
        Kernels::of(origin, driver, |kernels, source| self.add(driver, source, kernels)).map_err(|Why(why)| why)
    }

    fn add(&self, driver: &Driver, source: &Source, to: &mut Kernels) -> Result<(), Why> {
        let (options, kept) = (self.options(), self.path(source));
        if let Some(image) = kept.as_deref().and_then(read) {
            match to.add(driver, &image) {
                // The kept file is whole, but this driver does not take it: the source is compiled again.
                Err(refusal) if is_no_image(refusal.code) => {}
                added => return Ok(added?),
            }
        }
        let image = self.nvrtc.compile(source.name, source.text, HEADERS, &options).map_err(Why)?;
        to.add(driver, &image)?;
        if let Some(path) = kept {
            // A failure only makes the next start some seconds longer.
            write(&path, &image).unwrap_or_else(|why| tracing::warn!("the compiled kernels are not kept: {why}"));
        }
        Ok(())
    }

    fn options(&self) -> Vec<String> {
        OPTIONS.map(String::from).into_iter().chain([format!("--gpu-architecture=sm_{}", self.arch)]).collect()
    }

    /// Where the machine code of a source is kept.
    fn path(&self, source: &Source) -> Option<PathBuf> {
        self.cache.map(|dir| dir.join(self.file_name(source, &self.options())))
    }

    /// The name of a kept file, with a hash of everything that the machine code depends on.
    fn file_name(&self, source: &Source, options: &[String]) -> String {
        let (major, minor) = self.nvrtc.version;
        let mut all = format!("NVRTC {major}.{minor}\0{}\0{}\0{}\0", options.join("\0"), source.name, source.text);
        HEADERS.iter().for_each(|(name, text)| all += &format!("{name}\0{text}\0"));
        format!("{}-sm_{}-{:032x}.cubin", source.name, self.arch, xxh3_128(all.as_bytes()))
    }
}

/// Kibibytes that decompressing may allocate: the dictionary of `tools/nvrtc_check.py` is 4 MiB.
const MAX_DICTIONARY_KIB: u32 = 16 << 10;

/// Decompresses a source's PTX.
fn embedded_ptx(source: &Source) -> CString {
    let mut text = Vec::new();
    LzmaReader::new_mem_limit(source.ptx, MAX_DICTIONARY_KIB, None)
        .and_then(|mut reader| reader.read_to_end(&mut text))
        .expect("the build embeds PTX that decompresses");
    CString::new(text).expect("PTX has no zero byte")
}

const fn is_no_image(code: Code) -> bool {
    matches!(code, INVALID_IMAGE | NO_BINARY_FOR_GPU)
}

/// A kept file is this, then the 128 bits of the content's xxh3, then the content.
const MAGIC: &[u8; 8] = b"DINFCUB1";
const HEADER: usize = MAGIC.len() + 16;
/// Most bytes of a kept file that is read: machine code of some ten kernels is below a megabyte.
const MAX_IMAGE_BYTES: u64 = 64 << 20;

/// A kept file's content; `None` if it is not there or damaged.
fn read(path: &Path) -> Option<Vec<u8>> {
    if std::fs::metadata(path).ok()?.len() > MAX_IMAGE_BYTES {
        return None;
    }
    let mut bytes = std::fs::read(path).ok()?;
    let whole = bytes.get(..HEADER)?.starts_with(MAGIC)
        && bytes[MAGIC.len()..HEADER] == xxh3_128(&bytes[HEADER..]).to_le_bytes();
    whole.then(|| bytes.split_off(HEADER))
}

fn write(path: &Path, content: &[u8]) -> Result<(), String> {
    let dir = path.parent().expect("a file in the cache's directory");
    std::fs::create_dir_all(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let whole = [MAGIC, &xxh3_128(content).to_le_bytes()[..], content].concat();
    temporary::write_whole(path, &whole).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn embedded_ptx_is_small_and_has_every_kernel() {
        let mut compressed = 0;
        for source in SOURCES {
            compressed += source.ptx.len();
            let ptx = embedded_ptx(source).into_string().unwrap();
            assert!(ptx.contains("\n.target sm_75\n"), "{} is for another card", source.name);
            for name in source.functions() {
                assert!(ptx.contains(&format!(".entry {name}(")), "{} has no {name}", source.name);
            }
        }
        assert!(compressed < 1_000_000, "{compressed} bytes");
    }
}
