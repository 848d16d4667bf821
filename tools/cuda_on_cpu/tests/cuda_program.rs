//! The program on machines with a card, with one that fails, and with none: the text is the same, and every failure is a sentence.

mod common;
// It takes five minutes of one core, beside which the other tests here run.
#[path = "cuda_program/gpu_check.rs"]
mod gpu_check;

use common::{Done, Machine};

/// With the true gates, so that what lies where does not matter.
const RUN: [&str; 9] =
    ["run", "demo", "Once upon a time", "--temp", "0", "--ignore-eos", "--predictor", "exact", "--no-history"];

fn run(machine: &Machine, args: &[&str], environment: &[(&str, &str)]) -> Done {
    // A machine is about a device.
    let of_device: &[&str] = if args.contains(&"--device") { &["--machine", "demo-pc"] } else { &[] };
    machine.program(&[&RUN[..], &["-n", "40"], of_device, args].concat(), environment)
}

fn text_without_a_card() -> String {
    let done = run(&Machine::without_driver(), &[], &[]);
    assert_eq!(done.code, Some(0), "{}", done.said);
    done.out
}

#[test]
fn the_text_is_the_same_with_neurons_on_a_card() {
    let machine = Machine::new();
    let report = machine.dir.path().join("report");
    let report = [("CUDA_ON_CPU_REPORT", report.to_str().unwrap())];
    let expected = text_without_a_card();
    for args in [
        &["--device", "cuda", "--ffn-share", "0.5", "--policy", "static"][..],
        &["--device", "cuda", "--ffn-share", "0.3", "--deterministic"],
        &["--device", "cuda"],
        &["--device", "auto", "--ffn-share", "0.3", "--deterministic", "--vram-schedule", "10=5MiB,20=9MiB"],
        &[
            "--device",
            "cuda",
            "--ffn-share",
            "0.3",
            "--deterministic",
            "--vram-schedule",
            "10=5MiB,20=9MiB",
            "--graphs",
            "on",
        ],
    ] {
        let done = run(&machine, args, &report);
        assert_eq!(done.code, Some(0), "{args:?}: {}", done.said);
        assert_eq!(done.out, expected, "{args:?}");
        assert!(done.said.contains("CUDA on the CPU: 1.00 GiB of 1.00 GiB free"), "{}", done.said);
        assert!(done.said.contains("% of the active neurons, peak"), "{}", done.said);
    }
    let left = std::fs::read_to_string(machine.dir.path().join("report")).unwrap();
    assert_eq!(left.lines().count(), 5);
    assert!(left.lines().all(|line| line.starts_with("left: ; ")), "{left}");
}

/// The shipped file as it is, but for its length: what it measures on a machine with a card is the card, planned for one machine.
#[test]
fn an_experiment_whose_times_are_virtual_without_a_card_is_measured_with_one() {
    let machine = Machine::new();
    let shipped = include_str!("../../../configs/experiments/vram_sweep.toml");
    let shorter = shipped
        .replace("repeats = 2", "repeats = 1")
        .replace("n_gen = 64", "n_gen = 2")
        .replace("tokens = 512", "tokens = 8")
        .replace("\"static\", \"full\"", "\"full\"")
        .replace("0.0, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 1.0", "0.5");
    let (file, out) = (machine.dir.path().join("sweep.toml"), machine.dir.path().join("out"));
    std::fs::write(&file, shorter).unwrap();
    let args = ["experiment", file.to_str().unwrap(), "--out", out.to_str().unwrap()];
    let done = machine.program(&args, &[]);
    assert_eq!(done.code, Some(0), "{}", done.said);
    let page = std::fs::read_to_string(out.join("summary.md")).unwrap();
    assert!(page.contains("device=cuda") && !page.contains("virtual"), "{page}");
    assert!(page.contains("tokens_per_s") && page.contains("device_ffn_ms"), "{page}");
    assert!(std::fs::read_to_string(out.join("rows.jsonl")).unwrap().lines().count() == 1);
    assert!(out.join("machine.toml").is_file());
}

#[test]
fn a_machine_without_a_card_says_so_and_the_program_is_as_it_was() {
    let machine = Machine::without_driver();
    let none = "there is no NVIDIA driver (libcuda.so.1 is not found); install one, or take --device cpu";
    let done = run(&machine, &["--device", "cuda"], &[]);
    assert_eq!((done.code, done.out.as_str()), (Some(2), ""));
    assert_eq!(done.said, format!("dynamicinfer: {none}\n"));
    let done = run(&machine, &["--device", "auto"], &[]);
    assert_eq!((done.code, done.out), (Some(0), text_without_a_card()));
    assert!(done.said.starts_with(&format!("everything runs on the processor: {none}\n")), "{}", done.said);
}

#[test]
fn a_card_that_cannot_be_used_is_named_with_what_to_do() {
    for (environment, code, sentence) in [
        (
            ("CUDA_ON_CPU_VERSION", "11080"),
            2,
            "the NVIDIA driver is too old: it speaks CUDA 11.8, and 12.1 is needed; update it to 530 or newer, or take --device cpu",
        ),
        (
            ("CUDA_ON_CPU_CARDS", "0"),
            2,
            "there is no CUDA card; check that nvidia-smi lists one and that CUDA_VISIBLE_DEVICES does not hide it, or take \
             --device cpu",
        ),
        (
            ("CUDA_ON_CPU_ARCH", "61"),
            2,
            "CUDA on the CPU is too old: its compute capability is 6.1, and 7.5 (GTX 16, RTX 20) is needed; take --device cpu",
        ),
        (
            ("CUDA_ON_CPU_FAIL", "cuDevicePrimaryCtxRetain:1=46"),
            1,
            "the driver could not take the card: CUDA-capable device(s) is/are busy or unavailable (CUDA_ERROR_DEVICE_UNAVAILABLE, \
             46); another process holds the card alone, or it is in prohibited mode: look at nvidia-smi -q -d COMPUTE",
        ),
        (
            ("CUDA_ON_CPU_FAIL", "cuInit:1=4711"),
            1,
            "the driver could not start: unknown error (a code that this driver has no name for, 4711); run again; if it comes \
             back, nvidia-smi and the kernel's log (dmesg, Xid) say more",
        ),
    ] {
        let done = run(&Machine::new(), &["--device", "cuda"], &[environment]);
        assert_eq!((done.code, done.out.as_str()), (Some(code), ""), "{environment:?}: {}", done.said);
        assert_eq!(done.said.lines().last().unwrap(), format!("dynamicinfer: {sentence}"), "{environment:?}");
    }
}

#[test]
fn a_full_card_is_told_in_bytes() {
    let card = [("CUDA_ON_CPU_MEMORY", "4000000")];
    let done = run(&Machine::new(), &["--device", "cuda", "--vram", "64MiB"], &card);
    assert_eq!(done.code, Some(6), "{}", done.said);
    assert!(done.said.contains("the card has 4000000 bytes free and 67108864 more are needed"), "{}", done.said);
    // The driver refuses what the budget allows.
    let args = ["--device", "cuda", "--ffn-share", "0.5", "--tensor-cores", "off"];
    let done = run(&Machine::new(), &args, &[("CUDA_ON_CPU_FAIL", "cuMemAlloc_v2:4=2")]);
    assert_eq!(done.code, Some(6), "{}", done.said);
    assert!(done.said.lines().last().unwrap().ends_with("give a larger --vram"), "{}", done.said);
}

#[test]
fn a_card_that_fails_in_the_middle_of_a_text_ends_it_with_a_sentence_and_70() {
    for (function, graphs) in [
        ("cuLaunchKernel:60", "off"),
        ("cuMemcpyHtoDAsync_v2:300", "off"),
        ("cuMemcpyDtoHAsync_v2:30", "off"),
        ("cuGraphLaunch:40", "on"),
        ("cuGraphInstantiateWithFlags:3", "on"),
        ("cuGraphExecKernelNodeSetParams_v2:1", "on"),
    ] {
        let fail = format!("{function}=700");
        let args = ["--device", "cuda", "--ffn-share", "0.5", "--deterministic", "--graphs", graphs];
        let done = run(&Machine::new(), &args, &[("CUDA_ON_CPU_FAIL", &fail)]);
        assert_eq!(done.code, Some(70), "{function}: {}", done.said);
        let last = done.said.lines().last().unwrap();
        assert!(
            last.starts_with("dynamicinfer: the device has failed: CUDA on the CPU: the driver could not "),
            "{last}"
        );
        assert!(last.contains("an illegal memory access was encountered (CUDA_ERROR_ILLEGAL_ADDRESS, 700)"), "{last}");
    }
}

#[test]
fn a_card_that_makes_no_graphs_says_so_and_the_text_is_the_same() {
    let args = ["--device", "cuda", "--ffn-share", "0.5", "--deterministic", "--graphs", "on"];
    let done = run(&Machine::new(), &args, &[("CUDA_ON_CPU_FAIL", "cuGraphInstantiateWithFlags:3=2")]);
    assert_eq!((done.code, done.out), (Some(0), text_without_a_card()), "{}", done.said);
    let why = "the driver could not make a graph ready: out of memory (CUDA_ERROR_OUT_OF_MEMORY, 2)";
    let said = format!("CUDA graphs are not used, kernels are started one by one: {why}");
    assert!(done.said.contains(&said), "{}", done.said);
    for about in ["--graphs", "--tensor-cores"] {
        let done = run(&Machine::new(), &[about, "on"], &[]);
        assert_eq!(done.code, Some(2));
        let said = format!("dynamicinfer: {about} on needs a device; add --device cuda (or virtual)\n");
        assert_eq!(done.said, said);
    }
}

/// Compiled once for the card, again when a kept file is damaged, and for another card anew.
#[test]
fn kernels_are_compiled_once_and_a_damaged_one_again() {
    let machine = Machine::new().with_nvrtc();
    let (compiled, cache) = (machine.dir.path().join("compiled"), machine.dir.path().join("cache"));
    let mut count = 0;
    let mut run = |arch: &str, nvrtc: &str| {
        let environment = [
            ("CUDA_ON_CPU_COMPILED", compiled.to_str().unwrap()),
            ("XDG_CACHE_HOME", cache.to_str().unwrap()),
            ("CUDA_ON_CPU_ARCH", arch),
            ("CUDA_ON_CPU_NVRTC", nvrtc),
        ];
        // One token: kernels are compiled before the first, and each further one takes a quarter of a second on fibers.
        let args = ["--device", "cuda", "--machine", "demo-pc", "--ffn-share", "0.5", "-n", "1"];
        let done = machine.program(&[&RUN[..], &args].concat(), &environment);
        assert_eq!(done.code, Some(0), "{}", done.said);
        let before = count;
        count = std::fs::read_to_string(&compiled).map_or(0, |text| text.lines().count());
        (count - before, done.said)
    };
    let sources = dynamicinfer::device::kernel::SOURCES.len();
    let (first, said) = run("86", "12.4");
    assert!(said.contains("kernels compiled by NVRTC 12.4 for sm_86"), "{said}");
    assert_eq!((first, run("86", "12.4").0), (sources, 0));
    assert_eq!((run("89", "12.4").0, run("86", "12.6").0), (sources, sources));
    let kernels = cache.join("dynamicinfer/kernels");
    let kept: Vec<_> = std::fs::read_dir(&kernels).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(kept.len(), 3 * sources);
    let mine = |path: &&std::path::PathBuf| path.file_name().unwrap().to_str().unwrap().contains("sm_89");
    let [activation_threshold, turned, ..] = kept.iter().filter(mine).collect::<Vec<_>>()[..] else {
        panic!("{kept:?}")
    };
    let mut bytes = std::fs::read(activation_threshold).unwrap();
    std::fs::write(activation_threshold, &bytes[..bytes.len() / 2]).unwrap();
    bytes = std::fs::read(turned).unwrap();
    let last = bytes.len() - 2;
    bytes[last] ^= 1;
    std::fs::write(turned, bytes).unwrap();
    assert_eq!((run("89", "12.4").0, run("89", "12.4").0), (2, 0));
    // A compiler that is newer than the driver makes code that the driver does not know.
    let (none, said) = run("86", "13.0");
    assert_eq!(none, 0);
    assert!(said.contains("kernels from the embedded PTX"), "{said}");
}

/// The conclusion of `doctor --verbose` about the card and the details below it, separated by semicolons.
fn gpu(machine: &Machine, environment: &[(&str, &str)]) -> String {
    let done = machine.program(&["doctor", "--verbose"], environment);
    assert_eq!(done.code, Some(0), "{}", done.said);
    let mut lines = done.out.lines().skip_while(|line| line.split_whitespace().nth(1) != Some("GPU"));
    let found = lines.next().expect("a line about it");
    let details = lines.take_while(|line| line.starts_with("          "));
    let all = std::iter::once(found).chain(details).map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    all.collect::<Vec<_>>().join("; ")
}

/// The compiler that makes the embedded PTX, NVRTC 12.1, does not know `__dp4a` and left it a call of a function that is in no
/// module. No driver takes that: without an NVRTC beside it no card could be used.
#[test]
fn a_card_without_a_compiler_takes_the_embedded_kernels() {
    let said = gpu(&Machine::new(), &[]);
    assert!(said.starts_with("ok GPU ") && said.ends_with("; kernels from the embedded PTX"), "{said}");
}

#[test]
fn doctor_says_whether_the_compiler_is_one_that_was_shown_to_know_the_kernels() {
    let machine = Machine::new().with_nvrtc();
    let cache = machine.dir.path().join("cache");
    let with = |nvrtc| gpu(&machine, &[("XDG_CACHE_HOME", cache.to_str().unwrap()), ("CUDA_ON_CPU_NVRTC", nvrtc)]);
    let said = with("12.4");
    let shown = "; kernels compiled by NVRTC 12.4 for sm_86; NVRTC 12.4 is known to compile every kernel";
    assert!(said.ends_with(shown), "{said}");
    let said = with("12.77");
    let not = "; kernels compiled by NVRTC 12.77 for sm_86; NVRTC 12.77 is not tested with these kernels; 12.1, ";
    assert!(said.contains(not), "{said}");
}

#[test]
fn doctor_and_measure_know_the_card() {
    let whole = "GPU CUDA on the CPU, 1.00 GiB of 1.00 GiB free; compute capability 8.6, driver for CUDA 12.8";
    assert_eq!(gpu(&Machine::new(), &[]), format!("ok {whole}; kernels from the embedded PTX"));
    let poor = [("CUDA_ON_CPU_PINS", "0"), ("CUDA_ON_CPU_CHUNKS", "0")];
    assert_eq!(
        gpu(&Machine::new(), &poor),
        format!(
            "ok {whole}; it cannot free memory in part, so a changed budget copies whole layers; it cannot pin a mapped model, \
             so the processor copies neurons through 32 MiB of pinned memory; kernels from the embedded PTX"
        )
    );
    assert_eq!(
        gpu(&Machine::without_driver(), &[]),
        "note GPU none, everything runs on the processor: there is no NVIDIA driver (libcuda.so.1 is not found); install one, or take \
         --device cpu"
    );
    assert!(
        gpu(&Machine::new(), &[("CUDA_ON_CPU_FAIL", "cuInit:1=999")])
            .starts_with("problem GPU the driver could not start")
    );

    let machine = Machine::new();
    let card = [("CUDA_ON_CPU_LINK_MB_S", "500"), ("CUDA_ON_CPU_MEMORY", "67108864")];
    let profile = machine.dir.path().join("here.toml");
    let done = machine
        .program(&["measure", "-t", "1", "--save", profile.to_str().unwrap(), "--force", "--sync-us", "7"], &card);
    assert_eq!(done.code, Some(0), "{}", done.said);
    assert!(done.out.contains("\ncard: memory "), "{}", done.out);
    let text = std::fs::read_to_string(profile).unwrap();
    let number = |name: &str| -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name} = "))).expect(name);
        line.parse().unwrap()
    };
    // The link's rate is what the stand-in was given; nothing else here is a figure of anything.
    assert!((0.3..=0.51).contains(&number("link_gb_s")), "{text}");
    assert_eq!(number("sync_us"), 7.0);
    let list =
        |name: &str| text.split_once(&format!("\n{name} = [")).expect(name).1.split_once(']').unwrap().0.to_owned();
    assert!(list("measured").contains("device_gb_s") && list("measured").contains("copy_us"), "{text}");
    assert_eq!(list("assumed").trim_matches(['\n', ' ', ',']), "\"sync_us\"", "{text}");
}

#[test]
fn every_kernel_is_right_on_a_card_and_nothing_is_left_there() {
    let done = Machine::new().program(&["gpu-check", "--no-speed"], &[]);
    assert_eq!(done.code, Some(0), "{}{}", done.out, done.said);
    assert_eq!(done.out.lines().filter(|line| line.starts_with("ok ")).count(), 76 + 9, "{}", done.out);
    assert_eq!(done.out.lines().filter(|line| line.contains(", tensor cores ")).count(), 9, "{}", done.out);
}
