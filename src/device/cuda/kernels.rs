//! From embedded sources to functions of the card: compiled for it by NVRTC at first use and kept on disk, or the embedded PTX,
//! which the driver compiles.

use super::driver::{CUfunction, CUmodule, Code, Driver, INVALID_IMAGE, NO_BINARY_FOR_GPU, Refusal};
use super::nvrtc::Nvrtc;
use crate::formats::temporary;
use std::ffi::CString;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_128;

/// A translation unit.
#[derive(Clone, Copy)]
pub struct Source {
    /// As messages and the cache name it.
    pub name: &'static str,
    pub text: &'static str,
    /// What NVRTC made of it for compute_75, the oldest cards that are supported.
    pub ptx: &'static str,
    /// Its kernels.
    pub kernels: &'static [&'static str],
}

/// Where kernels may come from.
#[derive(Clone, Debug, Default)]
pub struct Delivery {
    /// Where machine code is kept; `None` compiles each time.
    pub cache: Option<PathBuf>,
    /// Files that may be NVRTC, before the names that the system knows it by.
    pub nvrtc: Vec<PathBuf>,
}

/// How the kernels came to be, for people: "compiled by NVRTC 12.4 for sm_86".
pub type Origin = String;

/// The modules, and their functions by the names of the kernels.
pub struct Kernels {
    modules: Vec<CUmodule>,
    functions: Vec<(&'static str, CUfunction)>,
    pub origin: Origin,
}

impl Kernels {
    /// `arch` is the card's compute capability, 86 for 8.6; `driver_version` as the driver tells it, 12020 for 12.2.
    ///
    /// # Errors
    /// What the driver said to the last way that there was.
    pub fn load(
        driver: &Driver,
        sources: &[Source],
        headers: &[(&str, &str)],
        options: &[&str],
        delivery: &Delivery,
        arch: u32,
        driver_version: u32,
    ) -> Result<Kernels, Refusal> {
        // Machine code of a compiler that is a major version ahead is not for this driver.
        let nvrtc = Nvrtc::find(&delivery.nvrtc).filter(|nvrtc| nvrtc.version.0 <= driver_version / 1000);
        if let Some(nvrtc) = &nvrtc {
            let compiler = Compiler { nvrtc, headers, options, arch, cache: delivery.cache.as_deref() };
            match compiler.load(driver, sources) {
                Ok(kernels) => return Ok(kernels),
                Err(why) => tracing::warn!("the kernels could not be compiled, the embedded ones are taken: {why}"),
            }
        }
        let mut kernels = Kernels { modules: Vec::new(), functions: Vec::new(), origin: "from the embedded PTX".into() };
        for source in sources {
            let ptx = CString::new(source.ptx).expect("PTX is text");
            if let Err(refusal) = kernels.add(driver, source, ptx.as_bytes_with_nul()) {
                kernels.unload(driver);
                return Err(refusal);
            }
        }
        Ok(kernels)
    }

    /// Loads an image and finds the source's kernels in it.
    fn add(&mut self, driver: &Driver, source: &Source, image: &[u8]) -> Result<(), Refusal> {
        let mut module = std::ptr::null_mut();
        // SAFETY: an image is PTX that ends with a zero, or machine code that tells its own length.
        let code = unsafe { (driver.f.module_load)(&mut module, image.as_ptr().cast()) };
        driver.check("load the kernels", code)?;
        self.modules.push(module);
        for &name in source.kernels {
            let symbol = CString::new(name).expect("a kernel's name has no zero");
            let mut function = std::ptr::null_mut();
            // SAFETY: the module is there; it writes a handle.
            let code = unsafe { (driver.f.function)(&mut function, module, symbol.as_ptr()) };
            driver.check("find a kernel in its module", code)?;
            self.functions.push((name, function));
        }
        Ok(())
    }

    /// The function of a kernel. There are some ten.
    ///
    /// # Panics
    /// If no source names it.
    pub fn function(&self, name: &str) -> CUfunction {
        let found = self.functions.iter().find(|(known, _)| *known == name);
        found.unwrap_or_else(|| panic!("no source has the kernel {name}")).1
    }

    pub fn all(&self) -> impl Iterator<Item = CUfunction> + '_ {
        self.functions.iter().map(|(_, function)| *function)
    }

    pub fn unload(self, driver: &Driver) {
        for module in self.modules {
            // SAFETY: loaded here, and nothing runs any more.
            unsafe { (driver.f.module_unload)(module) };
        }
    }
}

/// NVRTC for one card.
struct Compiler<'a> {
    nvrtc: &'a Nvrtc,
    headers: &'a [(&'a str, &'a str)],
    options: &'a [&'a str],
    arch: u32,
    cache: Option<&'a Path>,
}

impl Compiler<'_> {
    fn load(&self, driver: &Driver, sources: &[Source]) -> Result<Kernels, String> {
        let (major, minor) = self.nvrtc.version;
        let origin = format!("compiled by NVRTC {major}.{minor} for sm_{}", self.arch);
        let mut kernels = Kernels { modules: Vec::new(), functions: Vec::new(), origin };
        let added = sources.iter().try_for_each(|source| self.add(driver, source, &mut kernels));
        if added.is_err() {
            kernels.unload(driver);
            return added.map(|()| unreachable!("it is an error"));
        }
        Ok(kernels)
    }

    fn add(&self, driver: &Driver, source: &Source, to: &mut Kernels) -> Result<(), String> {
        let options: Vec<String> =
            self.options.iter().map(|o| o.to_string()).chain([format!("--gpu-architecture=sm_{}", self.arch)]).collect();
        let kept = self.cache.map(|dir| dir.join(self.file_name(source, &options)));
        if let Some(image) = kept.as_deref().and_then(read) {
            match to.add(driver, source, &image) {
                Ok(()) => return Ok(()),
                // Whole, and yet nothing for this driver: an older one was put in its place.
                Err(refusal) if is_no_image(refusal.code) => {}
                Err(refusal) => return Err(refusal.to_string()),
            }
        }
        let image = self.nvrtc.compile(source.name, source.text, self.headers, &options)?;
        to.add(driver, source, &image).map_err(|refusal| refusal.to_string())?;
        if let Some(path) = kept {
            // Without it the next start takes a second longer.
            write(&path, &image).unwrap_or_else(|why| tracing::warn!("the compiled kernels are not kept: {why}"));
        }
        Ok(())
    }

    /// Names everything that machine code depends on.
    fn file_name(&self, source: &Source, options: &[String]) -> String {
        let (major, minor) = self.nvrtc.version;
        let mut all = format!("NVRTC {major}.{minor}\0{}\0{}\0{}\0", options.join("\0"), source.name, source.text);
        self.headers.iter().for_each(|(name, text)| all += &format!("{name}\0{text}\0"));
        format!("{}-sm_{}-{:032x}.cubin", source.name, self.arch, xxh3_128(all.as_bytes()))
    }
}

const fn is_no_image(code: Code) -> bool {
    matches!(code, INVALID_IMAGE | NO_BINARY_FOR_GPU)
}

/// A kept file: this, the content's xxh3 of 128 bits, the content.
const MAGIC: &[u8; 8] = b"DINFCUB1";
const HEADER: usize = MAGIC.len() + 16;
/// Machine code of some ten kernels is below a megabyte.
const LONGEST: u64 = 64 << 20;

/// A kept file's content; `None` if it is not there or damaged.
fn read(path: &Path) -> Option<Vec<u8>> {
    if std::fs::metadata(path).ok()?.len() > LONGEST {
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
