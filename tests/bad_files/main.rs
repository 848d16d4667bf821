//! Every way a model file is known to be bad (checklist A of the reliability notes): each is refused with the file, the
//! field and the place, without a panic and without memory that the file's own length does not pay for.

mod directories;
mod gguf;
mod ours;
mod safetensors;
mod tokenizers;

use dynamicinfer::error::Error;
use dynamicinfer::formats::TensorInfo;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;

// Memory: what this thread holds now and at most held.

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn count(change: isize) {
    // A thread that is ending has no counters any more, and nothing to measure.
    let _ = HELD.try_with(|held| {
        held.set(held.get() + change);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(held.get())));
    });
}

// SAFETY: every call is the system allocator's own; the counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's contract is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
}

/// What `f` answers and the most bytes it held at once.
fn measured<T>(f: impl FnOnce() -> T) -> (T, usize) {
    let before = HELD.get();
    PEAK.set(before);
    let answer = f();
    (answer, (PEAK.get() - before) as usize)
}

/// The readers' promise: ten times the file, and room for a message.
fn allowed(file: usize) -> usize {
    10 * file + (64 << 10)
}

fn message<T>(parsed: Result<T, Error>, case: &str) -> String {
    let Err(error) = parsed else { panic!("{case}: was accepted") };
    assert!(matches!(error, Error::BadFile(_)), "{case}: {error:?}");
    assert_eq!(error.exit_code(), 5);
    let message = error.to_string();
    assert!(!message.contains(char::is_control), "{case}: {message:?}");
    message
}

/// What every reader promises of the tensors that it accepts.
fn assert_in_file(tensors: &[TensorInfo], file: usize) {
    let mut ranges: Vec<(u64, u64)> = tensors.iter().map(|t| (t.offset, t.offset + t.bytes)).collect();
    ranges.sort_unstable();
    assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "overlap: {ranges:?}");
    assert!(ranges.iter().all(|&(begin, end)| begin < end && end <= file as u64), "{ranges:?} in {file} bytes");
    for t in tensors {
        let numbers: usize = t.shape.iter().product();
        assert_eq!(t.bytes, t.dtype.row_bytes(numbers) as u64, "{t:?}");
    }
}

// Damage without a plan: every cut, every flipped bit, and many random edits.

/// A file that a cut or an edit turned bad: never a panic; where it is accepted, all is still in the file.
fn survives(parse: fn(&[u8]) -> Result<Vec<TensorInfo>, Error>, bytes: &[u8], case: &str) -> bool {
    let (parsed, peak) = measured(|| parse(bytes));
    assert!(peak <= allowed(bytes.len()), "{case}: {peak} bytes of memory for a file of {}", bytes.len());
    match parsed {
        Ok(tensors) => {
            assert_in_file(&tensors, bytes.len());
            true
        }
        Err(error) => {
            assert!(error.to_string().starts_with("model: "), "{case}: {error}");
            false
        }
    }
}

fn gguf_tensors(bytes: &[u8]) -> Result<Vec<TensorInfo>, Error> {
    dynamicinfer::formats::gguf::parse(bytes, Path::new("model")).map(|read| read.tensors)
}

fn safetensors_tensors(bytes: &[u8]) -> Result<Vec<TensorInfo>, Error> {
    dynamicinfer::formats::safetensors::parse(bytes, Path::new("model"))
}

type Reader = fn(&[u8]) -> Result<Vec<TensorInfo>, Error>;

/// A reader, a good file of more than 4 KiB, and the length of its header.
fn readers() -> [(Reader, Vec<u8>, usize); 2] {
    let mut large = gguf::good();
    large.tensors.push(gguf::tensor("d", &[5000], 0, 896));
    large.data = 896 + 20_000;
    let header = r#"{"a":{"dtype":"F32","shape":[5000],"data_offsets":[0,20000]},"b":{"dtype":"I64","shape":[2,3],"data_offsets":[20000,20048]}}"#;
    [
        (gguf_tensors, large.bytes(), large.header().len()),
        (safetensors_tensors, safetensors::st(header, 20_048), 8 + header.len()),
    ]
}

/// Seeds that the readers refuse would leave the fuzzers to guess what a file is.
#[test]
fn the_fuzzers_start_from_good_files() {
    for (parse, directory) in
        [(gguf_tensors as Reader, "fuzz/seeds/gguf"), (safetensors_tensors, "fuzz/seeds/safetensors")]
    {
        let seeds: Vec<_> = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(seeds.len() >= 3, "{directory}");
        for seed in seeds {
            assert!(survives(parse, &std::fs::read(&seed).unwrap(), seed.to_str().unwrap()), "{}", seed.display());
        }
    }
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    for (parse, bytes, header) in readers() {
        assert!(survives(parse, &bytes, "whole"));
        for end in (0..header).chain((header..bytes.len()).step_by(4096)).chain([bytes.len() - 1]) {
            assert!(!survives(parse, &bytes[..end], &format!("cut at {end}")), "cut at {end} was accepted");
        }
    }
}

#[test]
fn a_flipped_bit_never_leads_outside_the_file() {
    for (parse, good, header) in readers() {
        for bit in 0..8 * header {
            let mut bytes = good.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            survives(parse, &bytes, &format!("bit {bit}"));
        }
    }
}

#[test]
fn random_edits_never_lead_outside_the_file() {
    // splitmix64, so that a failure's number replays it.
    let random = |seed: &mut u64| {
        *seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (*seed ^ (*seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) as usize
    };
    let values = [0, 1, 0x7f, 0x80, 0xff, b'"', b'{', b'9'];
    let mut accepted = 0;
    for (parse, good, header) in readers() {
        for case in 0..10_000u64 {
            let mut seed = case;
            let mut bytes = good.clone();
            for _ in 0..1 + random(&mut seed) % 4 {
                let at = random(&mut seed) % header;
                let value = values[random(&mut seed) % values.len()];
                match random(&mut seed) % 4 {
                    0 => bytes[at] = value,
                    1 => bytes[at..at + 8].fill(value),
                    2 => bytes.insert(at, value),
                    _ => drop(bytes.remove(at)),
                }
            }
            accepted += usize::from(survives(parse, &bytes, &format!("case {case}")));
        }
    }
    // Edits of names are harmless: were none accepted, the edits would test nothing but the first check.
    assert!(accepted > 100, "{accepted}");
}
