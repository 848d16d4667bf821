//! The driver's functions, by their symbols. Codes and flags are those of the driver API's `CUresult` and enums.

use super::world::{Code, Event, Module, Op, Reservation, World, changed, wait, world};
use super::{Pins, append};
use crate::Kernel;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::MutexGuard;

pub(super) const INVALID_VALUE: Code = 1;
pub(super) const OUT_OF_MEMORY: Code = 2;
const NOT_INITIALISED: Code = 3;
const NO_DEVICE: Code = 100;
const INVALID_IMAGE: Code = 200;
const INVALID_CONTEXT: Code = 201;
const INVALID_PTX: Code = 218;
pub(super) const INVALID_HANDLE: Code = 400;
const NOT_FOUND: Code = 500;
const NOT_READY: Code = 600;
const NOT_SUPPORTED: Code = 801;

/// What memory is mapped in.
const GRANULE: u64 = 2 << 20;
/// New memory holds this: a NaN as f32 and f16, and no index.
const RUBBISH: u8 = 0xff;
pub(super) const CONTEXT: u64 = 0xc0;

thread_local! {
    static CURRENT: Cell<u64> = const { Cell::new(0) };
}

/// The world, unless the call is to fail.
fn enter(function: &'static str) -> Result<MutexGuard<'static, World>, Code> {
    let mut world = world();
    let failure = world.called(function);
    if world.sticky != 0 {
        return Err(world.sticky);
    }
    match failure {
        // A sticky error appears when the work runs; others are this call's own.
        Some(code) if code < 700 => Err(code),
        Some(code) if !is_queued(function) => {
            world.sticky = code;
            Err(code)
        }
        Some(code) => {
            FAILS.set(code);
            Ok(world)
        }
        None => Ok(world),
    }
}

thread_local! {
    /// What the operation that is being put on a stream is to end with.
    pub(super) static FAILS: Cell<Code> = const { Cell::new(0) };
}

fn is_queued(function: &str) -> bool {
    [
        "cuLaunchKernel",
        "cuGraphLaunch",
        "cuMemcpyHtoDAsync_v2",
        "cuMemcpyDtoHAsync_v2",
        "cuMemcpyBatchAsync",
        "cuMemsetD8Async",
    ]
    .contains(&function)
}

/// As [`enter`], with the context that most functions need.
pub(super) fn enter_context(function: &'static str) -> Result<MutexGuard<'static, World>, Code> {
    let world = enter(function)?;
    if CURRENT.get() == 0 { Err(INVALID_CONTEXT) } else { Ok(world) }
}

pub(super) fn put(world: &mut World, stream: u64, op: Op) -> Result<(), Code> {
    let code = FAILS.replace(0);
    world.put(stream, if code == 0 { op } else { Op::Fail(code) })
}

macro_rules! functions {
    ($($enter:ident $name:ident($($arg:ident: $type:ty),*) |$world:ident| $body:block)*) => {$(
        /// # Safety
        /// As the driver API's function of this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> Code {
            #[allow(unused_mut)]
            let mut run = || -> Result<(), Code> {
                #[allow(unused_mut, unused_variables)]
                let mut $world = $enter(stringify!($name))?;
                $body
            };
            run().err().unwrap_or(0)
        }
    )*};
}

/// Pages of their own, which are gone when they are given back: whoever still uses them ends the process.
fn pages(bytes: u64, access: ProtFlags) -> Result<u64, Code> {
    let length = bytes.next_multiple_of(4096) as usize;
    // SAFETY: new pages, anywhere.
    let at = unsafe { mmap_anonymous(std::ptr::null_mut(), length, access, MapFlags::PRIVATE | MapFlags::NORESERVE) };
    at.map(|at| at as u64).map_err(|_| OUT_OF_MEMORY)
}

fn unmap(at: u64, bytes: u64) {
    // SAFETY: mapped by `pages`; nothing of ours uses it.
    unsafe { munmap(at as *mut c_void, bytes.next_multiple_of(4096) as usize) }.expect("it was mapped");
}

/// Writes through a pointer of the caller's.
macro_rules! give {
    ($to:expr, $value:expr) => {
        // SAFETY: the caller gives a place for it, as the driver API asks.
        unsafe { *$to = $value }
    };
}

pub(super) use {functions, give};

functions! {
    enter cuInit(flags: c_uint) |world| {
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        if world.card.cards == 0 { Err(NO_DEVICE) } else { Ok(()) }
    }
    enter cuDriverGetVersion(version: *mut c_int) |world| {
        give!(version, world.card.version);
        Ok(())
    }
    enter cuDeviceGetCount(count: *mut c_int) |world| {
        give!(count, world.card.cards);
        Ok(())
    }
    enter cuDeviceGet(device: *mut c_int, number: c_int) |world| {
        give!(device, number);
        if number < world.card.cards { Ok(()) } else { Err(101) }
    }
    enter cuDeviceGetName(name: *mut c_char, room: c_int, device: c_int) |world| {
        let text = c"CUDA on the CPU";
        if (room as usize) < text.count_bytes() + 1 || device != 0 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: there is room for it.
        unsafe { name.copy_from_nonoverlapping(text.as_ptr(), text.count_bytes() + 1) };
        Ok(())
    }
    enter cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: c_int) |world| {
        if device != 0 {
            return Err(101);
        }
        give!(value, match attribute {
            16 => 4,
            75 => world.card.arch / 10,
            76 => world.card.arch % 10,
            99 => i32::from(world.card.pins != Pins::None),
            102 => i32::from(world.card.chunks),
            113 => i32::from(world.card.pins == Pins::All),
            _ => return Err(INVALID_VALUE),
        });
        Ok(())
    }
    enter cuDevicePrimaryCtxRetain(context: *mut u64, device: c_int) |world| {
        if device != 0 {
            return Err(101);
        }
        world.contexts += 1;
        give!(context, CONTEXT);
        Ok(())
    }
    enter cuCtxSetCurrent(context: u64) |world| {
        if context != 0 && world.contexts == 0 {
            return Err(INVALID_CONTEXT);
        }
        CURRENT.set(context);
        Ok(())
    }
    enter_context cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) |world| {
        give!(least, 0);
        give!(greatest, -5);
        Ok(())
    }
    enter_context cuMemGetInfo_v2(free: *mut usize, total: *mut usize) |world| {
        give!(total, world.card.memory as usize);
        give!(free, (world.card.memory - world.used) as usize);
        Ok(())
    }
    enter_context cuMemAlloc_v2(address: *mut u64, bytes: usize) |world| {
        let bytes = bytes as u64;
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        if world.used + bytes > world.card.memory {
            return Err(OUT_OF_MEMORY);
        }
        let at = pages(bytes, ProtFlags::READ | ProtFlags::WRITE)?;
        // SAFETY: new pages.
        unsafe { (at as *mut u8).write_bytes(RUBBISH, bytes as usize) };
        world.memory.insert(at, bytes);
        world.used += bytes;
        give!(address, at);
        Ok(())
    }
    enter_context cuMemFree_v2(address: u64) |world| {
        let bytes = world.memory.remove(&address).ok_or(INVALID_VALUE)?;
        world.used -= bytes;
        unmap(address, bytes);
        Ok(())
    }
    enter_context cuMemGetAllocationGranularity(granularity: *mut usize, properties: *const c_void, option: c_uint) |world| {
        give!(granularity, GRANULE as usize);
        if world.card.chunks && !properties.is_null() && option <= 1 { Ok(()) } else { Err(NOT_SUPPORTED) }
    }
    enter_context cuMemAddressReserve(address: *mut u64, bytes: usize, align: usize, at: u64, flags: c_ulonglong) |world| {
        let bytes = bytes as u64;
        if bytes == 0 || !bytes.is_multiple_of(GRANULE) || align != 0 || at != 0 || flags != 0 {
            return Err(INVALID_VALUE);
        }
        let at = pages(bytes, ProtFlags::empty())?;
        world.reservations.insert(at, Reservation { bytes, mapped: BTreeMap::new() });
        give!(address, at);
        Ok(())
    }
    enter_context cuMemAddressFree(address: u64, bytes: usize) |world| {
        match world.reservations.get(&address) {
            Some(there) if there.bytes == bytes as u64 && there.mapped.is_empty() => {}
            _ => return Err(INVALID_VALUE),
        }
        world.reservations.remove(&address);
        unmap(address, bytes as u64);
        Ok(())
    }
    enter_context cuMemCreate(handle: *mut u64, bytes: usize, properties: *const c_void, flags: c_ulonglong) |world| {
        let bytes = bytes as u64;
        if bytes == 0 || !bytes.is_multiple_of(GRANULE) || properties.is_null() || flags != 0 {
            return Err(INVALID_VALUE);
        }
        if world.used + bytes > world.card.memory {
            return Err(OUT_OF_MEMORY);
        }
        let id = world.handle();
        world.chunks.insert(id, (bytes, true, 0));
        world.used += bytes;
        give!(handle, id);
        Ok(())
    }
    enter_context cuMemRelease(handle: u64) |world| {
        match world.chunks.get_mut(&handle) {
            Some((_, held, _)) if *held => *held = false,
            _ => return Err(INVALID_VALUE),
        }
        forget(&mut world, handle);
        Ok(())
    }
    enter_context cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: c_ulonglong) |world| {
        let bytes = bytes as u64;
        let whole = world.chunks.get(&handle).is_some_and(|&(all, held, mapped)| all == bytes && held && mapped == 0);
        let (&first, there) = world.reservations.range_mut(..=address).next_back().ok_or(INVALID_VALUE)?;
        let free = address + bytes <= first + there.bytes
            && there.mapped.range(..address + bytes).next_back().is_none_or(|(&at, &(length, _))| at + length <= address);
        if !whole || !free || offset != 0 || flags != 0 {
            return Err(INVALID_VALUE);
        }
        there.mapped.insert(address, (bytes, false));
        world.chunks.get_mut(&handle).expect("looked at above").2 = 1;
        world.mapped_by.insert(address, handle);
        Ok(())
    }
    enter_context cuMemSetAccess(address: u64, bytes: usize, access: *const c_void, count: usize) |world| {
        let end = address + bytes as u64;
        let (_, there) = world.reservations.range_mut(..=address).next_back().ok_or(INVALID_VALUE)?;
        let mut at = address;
        while at < end {
            let (length, usable) = there.mapped.get_mut(&at).ok_or(INVALID_VALUE)?;
            let new = !std::mem::replace(usable, true);
            // SAFETY: pages of the reservation.
            unsafe { mprotect(at as *mut c_void, *length as usize, MprotectFlags::READ | MprotectFlags::WRITE) }
                .map_err(|_| OUT_OF_MEMORY)?;
            if new {
                // SAFETY: as above, and writable now.
                unsafe { (at as *mut u8).write_bytes(RUBBISH, *length as usize) };
            }
            at += *length;
        }
        if at == end && !access.is_null() && count == 1 { Ok(()) } else { Err(INVALID_VALUE) }
    }
    enter_context cuMemUnmap(address: u64, bytes: usize) |world| {
        let (_, there) = world.reservations.range_mut(..=address).next_back().ok_or(INVALID_VALUE)?;
        match there.mapped.get(&address) {
            Some(&(length, _)) if length == bytes as u64 => there.mapped.remove(&address),
            _ => return Err(INVALID_VALUE),
        };
        // SAFETY: pages of the reservation; new ones take their place, which nobody may touch.
        unsafe {
            rustix::mm::mmap_anonymous(
                address as *mut c_void,
                bytes,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED,
            )
        }
        .map_err(|_| OUT_OF_MEMORY)?;
        let handle = world.mapped_by.remove(&address).ok_or(INVALID_VALUE)?;
        world.chunks.get_mut(&handle).expect("it was mapped").2 = 0;
        forget(&mut world, handle);
        Ok(())
    }
    enter_context cuMemHostAlloc(address: *mut u64, bytes: usize, flags: c_uint) |world| {
        if flags & !7 != 0 || bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let at = pages(bytes as u64, ProtFlags::READ | ProtFlags::WRITE)?;
        world.pinned.insert(at, (bytes as u64, true));
        give!(address, at);
        Ok(())
    }
    enter_context cuMemFreeHost(address: u64) |world| {
        match world.pinned.get(&address) {
            Some((_, true)) => {}
            _ => return Err(INVALID_VALUE),
        }
        let (bytes, _) = world.pinned.remove(&address).expect("looked at above");
        unmap(address, bytes);
        Ok(())
    }
    enter_context cuMemHostRegister_v2(address: u64, bytes: usize, flags: c_uint) |world| {
        const READ_ONLY: u32 = 8;
        let allowed = match world.card.pins {
            Pins::All => true,
            Pins::Writable => flags & READ_ONLY == 0 && is_writable(address),
            Pins::None => return Err(NOT_SUPPORTED),
        };
        if !allowed || (flags & READ_ONLY == 0 && !is_writable(address)) {
            return Err(INVALID_VALUE);
        }
        // Whole pages are pinned: what shares one with what is pinned already is refused.
        let (first, end) = (address / 4096 * 4096, (address + bytes as u64).next_multiple_of(4096));
        if world.pinned.iter().any(|(&at, &(length, _))| at < end && first < at + length) {
            return Err(712);
        }
        world.pinned.insert(address, (bytes as u64, false));
        Ok(())
    }
    enter_context cuMemHostUnregister(address: u64) |world| {
        match world.pinned.remove(&address) {
            Some((_, false)) => Ok(()),
            _ => Err(713),
        }
    }
    enter_context cuMemcpyHtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) |world| {
        copy(world, stream, from, to, bytes, from)
    }
    enter_context cuMemHostGetDevicePointer_v2(address: *mut u64, host: u64, flags: c_uint) |world| {
        let pinned = world.pinned.range(..=host).next_back().is_some_and(|(&at, &(length, _))| host < at + length);
        if flags != 0 || !pinned || !world.card.sees_host {
            return Err(INVALID_VALUE);
        }
        give!(address, host);
        Ok(())
    }
    enter_context cuMemcpyBatchAsync(
        to: *const u64,
        from: *const u64,
        bytes: *const usize,
        count: usize,
        attributes: *const c_uint,
        firsts: *const usize,
        kinds: usize,
        failed: *mut usize,
        stream: u64
    ) |world| {
        // SAFETY: the caller gives as many of each as it says.
        let (order, first) = unsafe { (*attributes, *firsts) };
        if count == 0 || kinds != 1 || order != 1 || first != 0 || failed.is_null() {
            return Err(INVALID_VALUE);
        }
        let copies: Vec<(u64, u64, usize)> =
            // SAFETY: as above.
            (0..count).map(|i| unsafe { (*to.add(i), *from.add(i), *bytes.add(i)) }).collect();
        for (i, &(to, from, bytes)) in copies.iter().enumerate() {
            if !world.is_device(to, bytes as u64) || world.is_pinned(from, bytes as u64) != Ok(true) {
                give!(failed, i);
                return Err(INVALID_VALUE);
            }
        }
        // In no order among each other: a driver promises none.
        copies.into_iter().rev().try_for_each(|(to, from, bytes)| {
            put(&mut world, stream, Op::Copy { from, to, bytes, link: true })
        })
    }
    enter_context cuMemcpyDtoHAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) |world| {
        copy(world, stream, from, to, bytes, to)
    }
    enter_context cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: u64) |world| {
        if !world.is_device(from, bytes as u64) || !world.is_device(to, bytes as u64) {
            return Err(INVALID_VALUE);
        }
        put(&mut world, stream, Op::Copy { from, to, bytes, link: false })
    }
    enter_context cuMemsetD8Async(at: u64, value: u8, bytes: usize, stream: u64) |world| {
        if !world.is_device(at, bytes as u64) {
            return Err(INVALID_VALUE);
        }
        put(&mut world, stream, Op::Fill { at, bytes, value })
    }
    enter_context cuStreamCreateWithPriority(stream: *mut u64, flags: c_uint, priority: c_int) |world| {
        if flags > 1 || !(-5..=0).contains(&priority) {
            return Err(INVALID_VALUE);
        }
        give!(stream, world.open_stream(priority == 0));
        Ok(())
    }
    enter_context cuStreamDestroy_v2(stream: u64) |world| {
        world.is_idle(stream).ok_or(INVALID_HANDLE)?;
        world.close(stream);
        while world.is_idle(stream).is_some() {
            world = wait(world);
        }
        Ok(())
    }
    enter_context cuStreamWaitEvent(stream: u64, event: u64, flags: c_uint) |world| {
        let mark = world.events.get(&event).ok_or(INVALID_HANDLE)?.recorded;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        world.put(stream, Op::Wait { event, mark })
    }
    enter_context cuStreamQuery(stream: u64) |world| {
        world.want(stream);
        if world.is_idle(stream).ok_or(INVALID_HANDLE)? { Ok(()) } else { Err(NOT_READY) }
    }
    enter_context cuEventCreate(event: *mut u64, flags: c_uint) |world| {
        if flags & !7 != 0 {
            return Err(INVALID_VALUE);
        }
        let id = world.handle();
        world.events.insert(id, Event::new(flags & 2 == 0));
        give!(event, id);
        Ok(())
    }
    enter_context cuEventDestroy_v2(event: u64) |world| {
        world.events.remove(&event).map(|_| ()).ok_or(INVALID_HANDLE)
    }
    enter_context cuEventRecord(event: u64, stream: u64) |world| {
        world.record(event, stream)
    }
    enter_context cuEventQuery(event: u64) |world| {
        world.want_event(event);
        let state = world.events.get(&event).ok_or(INVALID_HANDLE)?;
        if state.done >= state.recorded { Ok(()) } else { Err(NOT_READY) }
    }
    enter_context cuEventElapsedTime(ms: *mut f32, begin: u64, end: u64) |world| {
        let when = |event: u64| {
            let state = world.events.get(&event).filter(|state| state.times).ok_or(INVALID_HANDLE)?;
            if state.done < state.recorded { Err(NOT_READY) } else { state.when.ok_or(INVALID_HANDLE) }
        };
        let (begin, end) = (when(begin)?, when(end)?);
        give!(ms, end.saturating_duration_since(begin).as_secs_f32() * 1e3);
        Ok(())
    }
    enter_context cuModuleLoadData(module: *mut u64, image: *const c_char) |world| {
        // SAFETY: PTX and the stand-in's machine code both end with a zero.
        let text = unsafe { CStr::from_ptr(image) }.to_bytes();
        if !super::nvrtc::is_image(text, world.card.arch) && !is_ptx(text, world.card.arch) {
            return Err(INVALID_IMAGE);
        }
        let text = String::from_utf8_lossy(text).into_owned();
        // Nothing is linked to a module that is loaded alone.
        if text.lines().any(|line| line.starts_with(".extern .func")) {
            return Err(INVALID_PTX);
        }
        let id = world.handle();
        let ptx = is_ptx(text.as_bytes(), i32::MAX);
        world.modules.insert(id, Module { text, ptx });
        give!(module, id);
        Ok(())
    }
    enter_context cuModuleUnload(module: u64) |world| {
        world.modules.remove(&module).map(|_| ()).ok_or(INVALID_HANDLE)
    }
    enter_context cuModuleGetFunction(function: *mut u64, module: u64, name: *const c_char) |world| {
        // SAFETY: the caller gives a string.
        let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| NOT_FOUND)?;
        let module = world.modules.get(&module).ok_or(INVALID_HANDLE)?;
        if module.ptx && !module.text.contains(&format!(".entry {name}(")) {
            return Err(NOT_FOUND);
        }
        let kernel = Kernel::find(name).ok_or(NOT_FOUND)?;
        world.functions.push((kernel, name.to_owned()));
        give!(function, world.functions.len() as u64);
        Ok(())
    }
    enter_context cuLaunchKernel(
        function: u64,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared: c_uint,
        stream: u64,
        arguments: *const *const c_void,
        extra: *const c_void
    ) |world| {
        let (grid, block) = ([grid_x, grid_y, grid_z], [block_x, block_y, block_z]);
        if !extra.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller gives a pointer for each argument.
        let op = unsafe { launch_op(&world, function, grid, block, shared, arguments)? };
        put(&mut world, stream, op)
    }
}

/// # Safety
/// As the driver API's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> Code {
    let mut world = world();
    if world.contexts == 0 {
        return NOT_INITIALISED;
    }
    world.contexts -= 1;
    if let Some(path) = world.card.report.clone() {
        append(&path, &format!("left: {}; {} copies waited", left(&world), world.pageable));
    }
    0
}

/// # Safety
/// As the driver API's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(code: Code, text: *mut *const c_char) -> Code {
    let name = match code {
        1 => c"CUDA_ERROR_INVALID_VALUE",
        2 => c"CUDA_ERROR_OUT_OF_MEMORY",
        46 => c"CUDA_ERROR_DEVICE_UNAVAILABLE",
        100 => c"CUDA_ERROR_NO_DEVICE",
        700 => c"CUDA_ERROR_ILLEGAL_ADDRESS",
        719 => c"CUDA_ERROR_LAUNCH_FAILED",
        801 => c"CUDA_ERROR_NOT_SUPPORTED",
        // As a driver answers for a code that it does not know.
        _ => return INVALID_VALUE,
    };
    give!(text, name.as_ptr());
    0
}

/// # Safety
/// As the driver API's function of this name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(code: Code, text: *mut *const c_char) -> Code {
    let words = match code {
        1 => c"invalid argument",
        2 => c"out of memory",
        46 => c"CUDA-capable device(s) is/are busy or unavailable",
        100 => c"no CUDA-capable device is detected",
        700 => c"an illegal memory access was encountered",
        719 => c"unspecified launch failure",
        801 => c"operation not supported",
        _ => return INVALID_VALUE,
    };
    give!(text, words.as_ptr());
    0
}

/// # Safety
/// There is a pointer for each argument of the kernel, to as many bytes as it has.
pub(super) unsafe fn launch_op(
    world: &World,
    function: u64,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    arguments: *const *const c_void,
) -> Result<Op, Code> {
    let (kernel, name) = world.functions.get((function as usize).wrapping_sub(1)).cloned().ok_or(INVALID_HANDLE)?;
    let [blocks, threads] = [grid, block].map(|sizes| sizes.iter().map(|&n| u64::from(n)).product::<u64>());
    // What a launch may have without asking for more.
    if blocks == 0 || threads == 0 || threads > 1024 || shared > 48 << 10 {
        return Err(INVALID_VALUE);
    }
    let word = |(i, bytes): (usize, usize)| {
        let mut word = [0u8; 8];
        // SAFETY: the caller's promise.
        unsafe { (*arguments.add(i)).cast::<u8>().copy_to_nonoverlapping(word.as_mut_ptr(), bytes) };
        u64::from_le_bytes(word)
    };
    let words = kernel.arguments().into_iter().enumerate().map(word).collect();
    Ok(Op::Launch { kernel, name, grid, block, shared: shared as usize, words })
}

/// A chunk goes when neither its handle nor a mapping holds it.
fn forget(world: &mut World, handle: u64) {
    if let Some(&(bytes, false, 0)) = world.chunks.get(&handle) {
        world.chunks.remove(&handle);
        world.used -= bytes;
    }
}

/// Copies over the link; `host` is the end that lies there. From memory that is not pinned the call waits for the copy.
fn copy(
    mut world: MutexGuard<'static, World>,
    stream: u64,
    from: u64,
    to: u64,
    bytes: usize,
    host: u64,
) -> Result<(), Code> {
    let device = if host == from { to } else { from };
    if !world.is_device(device, bytes as u64) {
        return Err(INVALID_VALUE);
    }
    let pinned = world.is_pinned(host, bytes as u64)?;
    put(&mut world, stream, Op::Copy { from, to, bytes, link: true })?;
    if !pinned {
        world.pageable += 1;
        world.want(stream);
        while world.is_idle(stream) == Some(false) && world.sticky == 0 {
            world = wait(world);
        }
    }
    changed();
    Ok(())
}

/// PTX for a card of at most this compute capability.
fn is_ptx(text: &[u8], arch: i32) -> bool {
    let text = String::from_utf8_lossy(text);
    let target = text.lines().find_map(|line| line.trim().strip_prefix(".target sm_")?.parse::<i32>().ok());
    text.contains(".version") && target.is_some_and(|target| target <= arch)
}

/// Whether the page at this address may be written to.
fn is_writable(address: u64) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines().any(|line| {
        let mut words = line.split(' ');
        let range = words.next().and_then(|range| range.split_once('-'));
        let Some((Ok(first), Ok(end))) =
            range.map(|(first, end)| (u64::from_str_radix(first, 16), u64::from_str_radix(end, 16)))
        else {
            return false;
        };
        (first..end).contains(&address) && words.next().is_some_and(|access| access.contains('w'))
    })
}

/// From now on these calls fail, as `CUDA_ON_CPU_FAIL` says it, counted anew; what was broken is whole again.
///
/// # Safety
/// `text` is a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_on_cpu_fail(text: *const c_char) {
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(text) }.to_str().expect("plain text");
    world().set_failures(super::failures(text));
}

/// How often a function was called since then.
///
/// # Safety
/// `function` is a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_on_cpu_calls(function: *const c_char) -> u64 {
    // SAFETY: the caller's promise.
    world().calls(unsafe { CStr::from_ptr(function) }.to_str().expect("plain text"))
}

/// From now on copies of streams of the least priority begin and do not end; of 0, they end again.
#[unsafe(no_mangle)]
pub extern "C" fn cuda_on_cpu_hold(on: c_int) {
    world().held = on != 0;
    changed();
}

/// What is not given back, in words; empty if everything is.
///
/// # Safety
/// `room` is writable for `bytes`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuda_on_cpu_left(room: *mut c_char, bytes: usize) {
    let text = left(&world());
    let length = text.len().min(bytes - 1);
    // SAFETY: the caller's promise.
    unsafe {
        room.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), length);
        *room.add(length) = 0;
    }
}

fn left(world: &World) -> String {
    let counts = [
        ("memory", world.memory.len()),
        ("reservations", world.reservations.len()),
        ("chunks", world.chunks.len()),
        ("pinned", world.pinned.len()),
        ("streams", world.streams.len()),
        ("events", world.events.len()),
        ("modules", world.modules.len()),
        ("graphs", world.graphs.len() + world.execs.len()),
        ("contexts", world.contexts as usize),
    ];
    let some = counts.into_iter().filter(|(_, count)| *count > 0);
    some.map(|(what, count)| format!("{count} {what}")).collect::<Vec<_>>().join(", ")
}
