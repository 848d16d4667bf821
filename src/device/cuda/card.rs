//! The search for a card that can be used, and the reasons why there is none.

use super::driver::{self, CUcontext, Driver, Refusal, remedy};
use super::memory::Chunks;
use crate::device::OutOfMemory;
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

/// The oldest driver that takes the embedded PTX (ISA 8.1): CUDA 12.1, NVIDIA driver 530.
pub const OLDEST_DRIVER: u32 = 12010;
/// The oldest cards that the PTX is for: Turing, GTX 16 and RTX 20.
pub const OLDEST_CARD: u32 = 75;

/// Why there is no CUDA device to work with, in a sentence with what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unusable {
    /// No driver.
    #[error("there is no NVIDIA driver (libcuda.so.1 is not found); install one, or take --device cpu")]
    NoDriver,
    /// A driver without this function.
    #[error("the NVIDIA driver is too old: it lacks {0}; update it to 530 or newer, or take --device cpu")]
    LacksSymbol(&'static str),
    /// A driver of this CUDA version, 11080 for 11.8.
    #[error(
        "the NVIDIA driver is too old: it speaks CUDA {}.{}, and {}.{} is needed; update it to 530 or newer, or take --device cpu",
        .0 / 1000, .0 % 1000 / 10, OLDEST_DRIVER / 1000, OLDEST_DRIVER % 1000 / 10
    )]
    OldDriver(u32),
    /// A driver that shows no card.
    #[error(
        "there is no CUDA card; check that nvidia-smi lists one and that CUDA_VISIBLE_DEVICES does not hide it, or take --device cpu"
    )]
    NoCard,
    /// A card older than [`OLDEST_CARD`].
    #[error("{name} is too old: its compute capability is {}.{}, and 7.5 (GTX 16, RTX 20) is needed; take --device cpu", arch / 10, arch % 10)]
    OldCard {
        /// As the driver calls it.
        name: String,
        /// Compute capability: 61 is 6.1.
        arch: u32,
    },
    /// The driver has refused something else.
    #[error("{refusal}; {}", remedy(refusal.code))]
    Refused {
        /// What the driver said.
        refusal: Refusal,
    },
    /// Too little free memory.
    #[error(
        "the card has {left} bytes free and {asked} more are needed; close what else uses it, or give a smaller --vram"
    )]
    Full {
        /// Bytes that are needed.
        asked: u64,
        /// Bytes that are free.
        left: u64,
    },
}

impl From<Refusal> for Unusable {
    fn from(refusal: Refusal) -> Unusable {
        match refusal.code {
            100 => Unusable::NoCard,
            _ => Unusable::Refused { refusal },
        }
    }
}

impl From<OutOfMemory> for Unusable {
    fn from(OutOfMemory { asked, left }: OutOfMemory) -> Unusable {
        Unusable::Full { asked, left }
    }
}

/// The first card of those that the driver shows, with its context.
pub struct Card {
    pub(super) driver: Driver,
    number: c_int,
    context: CUcontext,
    /// Number of this context, by which it is told from those that were there before it.
    serial: u64,
    /// As the driver calls it.
    pub name: String,
    /// Compute capability: 86 is 8.6.
    pub arch: u32,
    /// The newest CUDA that the driver speaks: 12020 is 12.2.
    pub driver_version: u32,
    /// All of its memory, bytes.
    pub total: u64,
    /// How much of it was free when the card was opened, bytes.
    pub free: u64,
    /// `None` where memory cannot be given back in part.
    pub(super) chunks: Option<Chunks>,
    /// Whether read-only memory can be pinned.
    pub pins_read_only: bool,
    abandoned: bool,
}

// SAFETY: the context is made current on the thread that uses the card, which `&mut` of its owner keeps to one at a time.
unsafe impl Send for Card {}

thread_local! {
    /// The card whose context is this thread's.
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

/// The first card that the driver shows, without a context.
struct First {
    driver: Driver,
    number: c_int,
    name: String,
    arch: u32,
    driver_version: u32,
}

impl First {
    fn find() -> Result<First, Unusable> {
        if !driver::is_present() {
            return Err(Unusable::NoDriver);
        }
        // SAFETY: it is present.
        let driver = unsafe { Driver::load() }.map_err(Unusable::LacksSymbol)?;
        // SAFETY: the flags must be 0.
        driver.check("start", unsafe { (driver.f.init)(0) })?;
        let driver_version = driver.version()?;
        if driver_version < OLDEST_DRIVER {
            return Err(Unusable::OldDriver(driver_version));
        }
        let mut count = 0;
        // SAFETY: it writes one number.
        driver.check("count the cards", unsafe { (driver.f.device_count)(&mut count) })?;
        if count == 0 {
            return Err(Unusable::NoCard);
        }
        let mut number = 0;
        // SAFETY: it writes one number; there is a first card.
        driver.check("open the card", unsafe { (driver.f.device)(&mut number, 0) })?;
        let name = driver.card_name(number)?;
        let [major, minor] = [
            Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        ]
        .map(|attribute| driver.attribute(number, attribute));
        let arch = (major? * 10 + minor?) as u32;
        if arch < OLDEST_CARD {
            return Err(Unusable::OldCard { name, arch });
        }
        Ok(First { driver, number, name, arch, driver_version })
    }
}

impl Card {
    /// Checks whether there is a card that can be used, as far as the driver says it without giving out memory of it.
    ///
    /// # Errors
    /// As [`Card::open`].
    pub fn look() -> Result<(), Unusable> {
        First::find().map(|_| ())
    }

    /// Opens the first card.
    ///
    /// # Errors
    /// If there is none that can be used.
    pub fn open() -> Result<Card, Unusable> {
        let First { driver, number, name, arch, driver_version } = First::find()?;
        let read_only = Attribute::CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED;
        // A driver that does not know the property does not have it.
        let pins_read_only = driver.attribute(number, read_only).is_ok_and(|v| v != 0);
        let mut context = std::ptr::null_mut();
        // SAFETY: it writes a handle, which `Drop` gives back.
        driver.check("take the card", unsafe { (driver.f.context_retain)(&mut context, number) })?;
        static SERIALS: AtomicU64 = AtomicU64::new(1);
        let serial = SERIALS.fetch_add(1, Ordering::Relaxed);
        let mut card = Card {
            driver,
            number,
            context,
            serial,
            name,
            arch,
            driver_version,
            total: 0,
            free: 0,
            chunks: None,
            pins_read_only,
            abandoned: false,
        };
        card.enter()?;
        card.chunks = Chunks::of(&card.driver, number)?;
        (card.free, card.total) = card.driver.memory()?;
        Ok(card)
    }

    /// 10^12 additions and multiplications of f32 a second, each counted, that its clock and lanes allow: what no kernel of ours can
    /// exceed in f32 and f16 without tensor cores. `None` where the driver does not tell.
    pub fn peak_tflop_s(&self) -> Option<f64> {
        let multiprocessors = self.multiprocessors()? as f64;
        let kilohertz = f64::from(self.ask(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?);
        // Lanes of a multiprocessor for f32, by NVIDIA's programming guide: 64 of Turing and the A100, 128 of all others.
        let lanes = if matches!(self.arch, 75 | 80) { 64.0 } else { 128.0 };
        Some(2.0 * multiprocessors * lanes * kilohertz / 1e9)
    }

    /// How many multiprocessors it has; `None` where the driver does not tell.
    pub(super) fn multiprocessors(&self) -> Option<usize> {
        self.ask(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT).map(|count| count as usize)
    }

    /// A property that is above zero where the driver knows it.
    fn ask(&self, attribute: Attribute) -> Option<i32> {
        self.driver.attribute(self.number, attribute).ok().filter(|&v| v > 0)
    }

    /// Makes its context this thread's.
    pub(super) fn enter(&self) -> Result<(), Refusal> {
        if CURRENT.get() == self.serial {
            return Ok(());
        }
        // SAFETY: the context lives as long as the card.
        self.driver.check("use the card on this thread", unsafe { (self.driver.f.context_set)(self.context) })?;
        CURRENT.set(self.serial);
        Ok(())
    }

    pub(super) const fn context(&self) -> CUcontext {
        self.context
    }

    /// Notes that the card has failed: it is not asked for anything any more, not even to be given back.
    pub(super) fn abandon(&mut self) {
        self.abandoned = true;
    }

    /// Whether a buffer can give memory back in part.
    pub fn gives_back_in_part(&self) -> bool {
        self.chunks.is_some()
    }
}

impl Drop for Card {
    fn drop(&mut self) {
        if CURRENT.get() == self.serial {
            CURRENT.set(0);
        }
        if self.abandoned {
            return;
        }
        // SAFETY: retained when it was opened. Its failure could not be handled.
        unsafe { (self.driver.f.context_release)(self.number) };
    }
}
