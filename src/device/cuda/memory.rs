//! Device memory of one buffer: taken whole, or in chunks behind a range of addresses so that it can grow where it lies and give
//! back what it no longer needs (the driver's virtual memory management).

use super::driver::{Address, CUstream, Driver, NOT_READY, OUT_OF_MEMORY, Refusal};
use cudarc::driver::sys;

/// A buffer.
pub(super) struct Bytes {
    /// Where its bytes are.
    pub allocation: Allocation,
    /// Its length.
    pub bytes: u64,
    /// The most bytes that it may grow to.
    pub most: u64,
    /// Whether its bytes are only counted ([`crate::device::Device::reserve`]).
    pub reserved: bool,
}

/// How a card gives memory in chunks.
#[derive(Clone, Copy)]
pub struct Chunks {
    card: i32,
    /// Bytes of a chunk: 2 MiB on today's cards.
    pub granule: usize,
}

impl Chunks {
    /// `None` where the card or its driver has no such memory management.
    pub fn of(driver: &Driver, card: i32) -> Result<Option<Chunks>, Refusal> {
        use sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED as SUPPORTED;
        if driver.attribute(card, SUPPORTED)? == 0 {
            return Ok(None);
        }
        let chunks = Chunks { card, granule: 0 };
        let mut granule = 0;
        let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM as u32;
        // SAFETY: it reads the properties and writes one number.
        let code = unsafe { (driver.f.granularity)(&mut granule, &chunks.properties(), minimum) };
        driver.check("tell the size of its chunks", code)?;
        Ok((granule > 0).then_some(Chunks { granule, ..chunks }))
    }

    fn location(&self) -> sys::CUmemLocation {
        sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: self.card }
    }

    fn properties(&self) -> sys::CUmemAllocationProp {
        sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
            location: self.location(),
            win32HandleMetaData: std::ptr::null_mut(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        }
    }
}

/// Where a buffer's bytes lie.
#[derive(Debug)]
pub enum Allocation {
    /// Nowhere: it has no bytes, or they are only counted.
    Nowhere,
    Whole {
        address: Address,
        bytes: usize,
    },
    Chunked {
        address: Address,
        reserved: usize,
        mapped: usize,
    },
}

impl Allocation {
    /// `bytes` now.
    pub fn whole(driver: &Driver, bytes: usize) -> Result<Allocation, Refusal> {
        if bytes == 0 {
            return Ok(Allocation::Nowhere);
        }
        let mut address = 0;
        // SAFETY: it writes an address.
        driver.check("take memory", unsafe { (driver.f.alloc)(&mut address, bytes) })?;
        Ok(Allocation::Whole { address, bytes })
    }

    /// Addresses for `most` bytes, without memory behind them.
    pub fn addresses(driver: &Driver, chunks: &Chunks, most: usize) -> Result<Allocation, Refusal> {
        let reserved = most.next_multiple_of(chunks.granule);
        let mut address = 0;
        // SAFETY: it writes an address; it may be any.
        let code = unsafe { (driver.f.address_reserve)(&mut address, reserved, 0, 0, 0) };
        driver.check("reserve addresses", code)?;
        Ok(Allocation::Chunked { address, reserved, mapped: 0 })
    }

    /// The address of its first byte; 0 if it is nowhere.
    pub const fn address(&self) -> Address {
        match *self {
            Allocation::Nowhere => 0,
            Allocation::Whole { address, .. } | Allocation::Chunked { address, .. } => address,
        }
    }

    /// Bytes that it takes from the card.
    pub const fn taken(&self) -> usize {
        match *self {
            Allocation::Nowhere => 0,
            Allocation::Whole { bytes, .. } => bytes,
            Allocation::Chunked { mapped, .. } => mapped,
        }
    }

    /// Gives a chunked allocation memory for `bytes`, rounded up to whole chunks. No work may be using it. If it cannot grow it stays as it
    /// was.
    pub fn fit(&mut self, driver: &Driver, chunks: &Chunks, bytes: usize) -> Result<(), Refusal> {
        let Allocation::Chunked { address, reserved, mapped } = self else {
            panic!("only chunked memory grows and shrinks")
        };
        let wanted = bytes.next_multiple_of(chunks.granule);
        assert!(wanted <= *reserved);
        while *mapped > wanted {
            // SAFETY: a granule was mapped there by itself, and no work uses it.
            let code = unsafe { (driver.f.chunk_unmap)(*address + (*mapped - chunks.granule) as u64, chunks.granule) };
            driver.check("give back memory", code)?;
            *mapped -= chunks.granule;
        }
        let before = *mapped;
        let grown = grow(driver, chunks, *address, mapped, wanted);
        if grown.is_err() {
            while *mapped > before {
                *mapped -= chunks.granule;
                // SAFETY: mapped below, by itself, and never used. Its return is of no use: the first failure is told.
                unsafe { (driver.f.chunk_unmap)(*address + *mapped as u64, chunks.granule) };
            }
        }
        grown
    }

    /// Replaces memory that was taken whole by other memory of `bytes`, and copies the first `kept` bytes. While it copies both take
    /// memory; where the card has no room for both, the bytes are kept on the host meanwhile. No work may be using it. If it cannot grow
    /// it stays as it was.
    pub fn move_to(&mut self, driver: &Driver, bytes: usize, kept: usize, stream: CUstream) -> Result<(), Refusal> {
        let to = match Allocation::whole(driver, bytes) {
            Ok(to) => to,
            Err(refusal) if refusal.code == OUT_OF_MEMORY && bytes <= self.taken() => {
                return self.move_through_host(driver, bytes, kept, stream);
            }
            Err(refusal) => return Err(refusal),
        };
        if kept > 0 {
            // SAFETY: both have as many bytes, and nothing else uses them.
            let code = unsafe { (driver.f.copy_within)(to.address(), self.address(), kept, stream) };
            let copied = driver.check("move memory", code).and_then(|()| finish(driver, stream));
            if let Err(refusal) = copied {
                to.release(driver, None);
                return Err(refusal);
            }
        }
        std::mem::replace(self, to).release(driver, None);
        Ok(())
    }

    fn move_through_host(
        &mut self,
        driver: &Driver,
        bytes: usize,
        kept: usize,
        stream: CUstream,
    ) -> Result<(), Refusal> {
        let mut host = vec![0u8; kept];
        // SAFETY: the buffer has as many bytes; `host` lives until the copy is done.
        let code = unsafe { (driver.f.copy_out)(host.as_mut_ptr().cast(), self.address(), kept, stream) };
        driver.check("move memory", code).and_then(|()| finish(driver, stream))?;
        std::mem::replace(self, Allocation::Nowhere).release(driver, None);
        *self = Allocation::whole(driver, bytes)?;
        // SAFETY: as above.
        let code = unsafe { (driver.f.copy_in)(self.address(), host.as_ptr().cast(), kept, stream) };
        driver.check("move memory", code).and_then(|()| finish(driver, stream))
    }

    /// Gives everything back. Errors are ignored: they come only from a driver that has failed already.
    pub fn release(self, driver: &Driver, chunks: Option<&Chunks>) {
        match (self, chunks) {
            (Allocation::Nowhere, _) => {}
            // SAFETY: it was taken there, and no work uses it.
            (Allocation::Whole { address, .. }, _) => _ = unsafe { (driver.f.free)(address) },
            (Allocation::Chunked { address, reserved, mapped }, Some(chunks)) => {
                for at in (0..mapped).step_by(chunks.granule) {
                    // SAFETY: each granule was mapped by itself, and no work uses it.
                    unsafe { (driver.f.chunk_unmap)(address + at as u64, chunks.granule) };
                }
                // SAFETY: nothing is mapped there any more.
                unsafe { (driver.f.address_free)(address, reserved) };
            }
            (Allocation::Chunked { .. }, None) => unreachable!("chunks were there when it was made"),
        }
    }
}

/// Waits for a stream; its work is a copy of ours.
fn finish(driver: &Driver, stream: CUstream) -> Result<(), Refusal> {
    loop {
        // SAFETY: the stream is there.
        match unsafe { (driver.f.stream_query)(stream) } {
            NOT_READY => std::thread::yield_now(),
            code => return driver.check("move memory", code),
        }
    }
}

/// Maps granules until `wanted`, and makes those of this call readable and writable.
fn grow(driver: &Driver, chunks: &Chunks, at: Address, mapped: &mut usize, wanted: usize) -> Result<(), Refusal> {
    let first = *mapped;
    while *mapped < wanted {
        let mut handle = 0;
        // SAFETY: it reads the properties and writes a handle.
        let code = unsafe { (driver.f.chunk_create)(&mut handle, chunks.granule, &chunks.properties(), 0) };
        driver.check("take memory", code)?;
        // SAFETY: the addresses are reserved and nothing is mapped there.
        let code = unsafe { (driver.f.chunk_map)(at + *mapped as u64, chunks.granule, 0, handle, 0) };
        // SAFETY: a handle of ours; what is mapped stays until it is unmapped.
        unsafe { (driver.f.chunk_release)(handle) };
        driver.check("map memory", code)?;
        *mapped += chunks.granule;
    }
    if first == wanted {
        return Ok(());
    }
    let flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    let access = sys::CUmemAccessDesc { location: chunks.location(), flags };
    // SAFETY: all of the range is mapped.
    let code = unsafe { (driver.f.chunk_access)(at + first as u64, wanted - first, &access, 1) };
    driver.check("use memory", code)
}
