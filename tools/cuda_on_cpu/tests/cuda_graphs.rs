//! Sequences that a card starts as graphs: they do what their calls do, whatever changes between two of them.

mod common;

use common::{Machine, StandIn, device, on, room, with_graphs};
use dynamicinfer::device::cuda::CudaDevice;
use dynamicinfer::device::{Add, Buffer, Call, Device, PinnedBuffer, Stream, View};
use dynamicinfer::machine::kernel_check::launching;
use dynamicinfer::prng::Prng;

const MIB: u64 = 1 << 20;
const WORDS: usize = 64;

fn add(count: usize, from: Buffer, to: Buffer) -> Call {
    Call::Add(Add { count, from: from.into(), to: to.into(), scale: 1.0 })
}

/// What is copied in, added to `sums` as often as is said, and copied out.
struct Sequence {
    input: PinnedBuffer,
    output: PinnedBuffer,
    term: Buffer,
    sums: Buffer,
}

impl Sequence {
    fn new(device: &mut CudaDevice) -> Sequence {
        let (input, output) = (room(device, WORDS), room(device, WORDS));
        let (term, sums) = (device.alloc(WORDS as u64 * 4).unwrap(), device.alloc_growable(256, MIB).unwrap());
        Sequence { input, output, term, sums }
    }

    /// The sums from number `at` on are what comes out.
    fn run(&mut self, device: &mut CudaDevice, number: usize, times: usize, count: usize, at: usize) {
        let Sequence { input, output, term, sums } = self;
        let to = View { buffer: *sums, at: at as u64 * 4 };
        device.begin_sequence(number);
        // SAFETY: the tests keep both until they have synchronised.
        unsafe { device.copy_in(Stream::Compute, input.as_ptr().cast(), count * 4, *term, 0) };
        (0..times).for_each(|_| {
            device.launch(Stream::Compute, &Call::Add(Add { count, from: (*term).into(), to, scale: 1.0 }));
        });
        // SAFETY: as above.
        unsafe { device.copy_out(Stream::Compute, *sums, to.at, output.as_mut_ptr().cast(), count * 4) };
        device.end_sequence();
        device.synchronize(Stream::Compute);
    }
}

const FUNCTIONS: [&str; 6] = [
    "cuGraphLaunch",
    "cuLaunchKernel",
    "cuMemcpyHtoDAsync_v2",
    "cuGraphInstantiateWithFlags",
    "cuGraphExecKernelNodeSetParams_v2",
    "cuGraphExecMemcpyNodeSetParams",
];

#[test]
fn what_comes_again_unchanged_is_one_call_of_the_driver() {
    on(&Machine::new(), "what_comes_again_unchanged_is_one_call_of_the_driver", &[], || {
        let (mut device, stand_in) = (with_graphs(64 * MIB), StandIn::new());
        let mut s = Sequence::new(&mut device);
        let calls = |stand_in: &StandIn| FUNCTIONS.map(|f| stand_in.calls(f));
        let mut expected = [0f32; WORDS];
        let mut step = |device: &mut CudaDevice, times, count, at: usize| {
            for (i, word) in s.input.iter_mut().enumerate() {
                *word = (i as f32).to_bits();
            }
            stand_in.fail("");
            s.run(device, 5, times, count, at);
            for i in 0..count {
                expected[at + i] += times as f32 * i as f32;
                assert_eq!(f32::from_bits(s.output[i]), expected[at + i]);
            }
            calls(&stand_in)
        };
        assert_eq!(step(&mut device, 3, 64, 0), [1, 0, 0, 1, 0, 0], "made, and started");
        assert_eq!(step(&mut device, 3, 64, 0), [1, 0, 0, 0, 0, 0], "started");
        // Other operands: three kernels, and the copy out.
        assert_eq!(step(&mut device, 3, 60, 4), [1, 0, 0, 0, 3, 2]);
        assert_eq!(step(&mut device, 3, 60, 4), [1, 0, 0, 0, 0, 0]);
        // Another kernel more: another graph.
        assert_eq!(step(&mut device, 4, 60, 4), [1, 0, 0, 1, 0, 0]);
        let (totals, launches) = (device.totals(), 3 * 4 + 4);
        assert_eq!((totals.launches, totals.copies, totals.link_bytes), (launches, 10, [2 * 256 + 3 * 240; 2]));
        drop(device);
        assert_eq!(stand_in.left(), "");
    });
}

/// Operands, lengths and numbers of kernels change at random, buffers are given back, come again somewhere else and shrink.
fn does_what_its_calls_do(seed: u64, device: &mut CudaDevice) -> Vec<u32> {
    let mut rng = Prng::new(seed);
    let mut sequences = [Sequence::new(device), Sequence::new(device)];
    let mut seen = Vec::new();
    for _ in 0..200 {
        let which = rng.below(2) as usize;
        let s = &mut sequences[which];
        match rng.below(8) {
            0 => {
                device.free(s.term);
                // Something else lies where it was.
                let other = device.alloc(WORDS as u64 * 4).unwrap();
                s.term = device.alloc(WORDS as u64 * 4).unwrap();
                device.free(other);
            }
            1 => {
                let bytes = [256, 4096, MIB / 2][rng.below(3) as usize];
                s.sums = device.resize(s.sums, bytes).unwrap();
            }
            _ => {}
        }
        s.input.iter_mut().for_each(|word| *word = (rng.below(100) as f32).to_bits());
        let (times, count) = (1 + rng.below(3) as usize, 4 * (1 + rng.below(8) as usize));
        let at = 4 * rng.below((WORDS - count) as u64 / 4 + 1) as usize;
        s.run(device, which, times, count, at);
        seen.extend_from_slice(&s.output[..count]);
    }
    seen
}

#[test]
fn a_graph_does_what_its_calls_do_whatever_has_moved_or_gone() {
    let name = "a_graph_does_what_its_calls_do_whatever_has_moved_or_gone";
    let card = [("CUDA_ON_CPU_CHUNKS", "0"), ("CUDA_ON_CPU_LAZY", "1")];
    on(&Machine::new(), name, &card, || {
        for seed in 0..5 {
            let expected = does_what_its_calls_do(seed, &mut device(64 * MIB));
            let mut graphs = with_graphs(64 * MIB);
            assert_eq!(does_what_its_calls_do(seed, &mut graphs), expected, "seed {seed}");
            assert_eq!(graphs.fault(), None);
        }
        assert_eq!(StandIn::new().left(), "");
    });
}

/// Marks, waits and copies from memory that is not pinned are no part of a graph: they come where they were put.
#[test]
fn what_cannot_be_part_of_a_graph_keeps_its_place() {
    on(&Machine::new(), "what_cannot_be_part_of_a_graph_keeps_its_place", &[("CUDA_ON_CPU_LAZY", "1")], || {
        let (mut device, stand_in) = (with_graphs(64 * MIB), StandIn::new());
        let buffers = [(); 2].map(|()| device.alloc(16).unwrap());
        let (mut one, mut seen) = (room(&mut device, 4), room(&mut device, 4));
        one.fill(1f32.to_bits());
        let event = device.event();
        let run = |device: &mut CudaDevice, seen: &mut PinnedBuffer, between: &mut dyn FnMut(&mut CudaDevice)| {
            device.begin_sequence(0);
            // SAFETY: kept until the device has been waited for.
            unsafe { device.copy_in(Stream::Compute, one.as_ptr().cast(), 16, buffers[0], 0) };
            device.launch(Stream::Compute, &add(4, buffers[0], buffers[1]));
            between(device);
            device.launch(Stream::Compute, &add(4, buffers[0], buffers[1]));
            device.end_sequence();
            // SAFETY: as above.
            unsafe { device.copy_out(Stream::Compute, buffers[1], 0, seen.as_mut_ptr().cast(), 16) };
            device.synchronize(Stream::Compute);
            f32::from_bits(seen[3])
        };
        assert_eq!(run(&mut device, &mut seen, &mut |_| ()), 2.0);
        // The mark stands behind the first kernel.
        let mut recorded = |device: &mut CudaDevice| {
            device.record(Stream::Compute, event);
            device.synchronize_event(event);
        };
        stand_in.fail("");
        assert_eq!(run(&mut device, &mut seen, &mut recorded), 4.0);
        assert_eq!(["cuGraphLaunch", "cuLaunchKernel"].map(|f| stand_in.calls(f)), [0, 2]);
        stand_in.fail("");
        assert_eq!(run(&mut device, &mut seen, &mut |_| ()), 6.0);
        assert_eq!(["cuGraphLaunch", "cuLaunchKernel"].map(|f| stand_in.calls(f)), [1, 0]);
        let ten = [10f32.to_bits(); 4];
        // SAFETY: not pinned: the call waits for the copy.
        let mut unpinned = |device: &mut CudaDevice| unsafe {
            device.copy_in(Stream::Compute, ten.as_ptr().cast(), 16, buffers[0], 0);
        };
        assert_eq!(run(&mut device, &mut seen, &mut unpinned), 17.0);
        assert_eq!(device.fault(), None);
    });
}

/// What it takes is the machine's; that it is graphs that are timed is ours.
#[test]
fn what_gpu_check_times_as_graphs_are_graphs() {
    on(&Machine::new(), "what_gpu_check_times_as_graphs_are_graphs", &[], || {
        let (mut device, stand_in) = (with_graphs(64 * MIB), StandIn::new());
        let took = launching(&mut device).unwrap();
        assert!(took.calls == 9 && took.one_by_one_us > 0.0 && took.graphs_us > 0.0, "{took:?}");
        let (layers, times) = (8, 6);
        let calls = ["cuGraphInstantiateWithFlags", "cuGraphLaunch"].map(|f| stand_in.calls(f));
        assert_eq!(calls, [4 * layers, 4 * layers * times]);
        assert_eq!(device.memory().used, 0);
    });
}

/// A graph that cannot be made is done without; what fails when it runs is a fault, as a kernel's is.
#[test]
fn each_call_for_graphs_fails_once() {
    on(&Machine::new(), "each_call_for_graphs_fails_once", &[], || {
        let stand_in = StandIn::new();
        let run = |stand_in: &StandIn, fail: &str| {
            let mut device = with_graphs(64 * MIB);
            let mut s = Sequence::new(&mut device);
            stand_in.fail(fail);
            let mut seen = Vec::new();
            for (times, count) in [(2, 64), (2, 64), (2, 32), (3, 32), (3, 32)] {
                s.input.fill(1f32.to_bits());
                s.run(&mut device, 0, times, count, 0);
                seen.push(f32::from_bits(s.output[0]));
            }
            (seen, device.fault().map(|fault| fault.0.clone()))
        };
        let (right, _) = run(&stand_in, "");
        assert_eq!(right, [2.0, 4.0, 6.0, 9.0, 12.0]);
        let making = [
            "cuGraphCreate",
            "cuGraphAddKernelNode_v2",
            "cuGraphAddMemcpyNode",
            "cuGraphInstantiateWithFlags",
            "cuGraphExecKernelNodeSetParams_v2",
            "cuGraphExecMemcpyNodeSetParams",
        ];
        let calls = |function: &str| {
            run(&stand_in, "");
            let calls = stand_in.calls(function);
            assert!(calls > 0, "{function} is not called");
            1..=calls
        };
        for function in making {
            for call in calls(function) {
                let done = run(&stand_in, &format!("{function}:{call}=2"));
                assert_eq!(done, (right.clone(), None), "{function} {call}");
                assert_eq!(stand_in.left(), "", "{function} {call}");
            }
        }
        // From here on cards are left as they are, for they answer no more.
        for function in making.into_iter().chain(["cuGraphLaunch"]) {
            for call in calls(function) {
                let (_, fault) = run(&stand_in, &format!("{function}:{call}=700"));
                let said = fault.expect("an error that stays");
                assert!(said.starts_with("CUDA on the CPU: the driver could not ") && said.contains("700"), "{said}");
                stand_in.fail("");
            }
        }
        let said = run(&stand_in, "cuGraphLaunch:2=2").1.expect("a launch that is refused");
        assert!(said.contains("the driver could not launch a graph: out of memory"), "{said}");
    });
}
