//! A timeline of a card: its events placed on the host's clock, over a link that takes its time.

mod common;
#[path = "../../../tests/support/timeline.rs"]
mod timeline;

use common::Machine;
use timeline::Trace;

#[test]
fn both_halves_work_at_the_same_time_and_everything_lies_in_its_token() {
    let machine = Machine::new();
    let file = machine.dir.path().join("trace.json");
    let args = [
        "run",
        "demo",
        "Once upon a time",
        "--temp",
        "0",
        "-n",
        "16",
        "--ignore-eos",
        "--no-history",
        "--machine",
        "demo-pc",
        "--device",
        "cuda",
        "--ffn-share",
        "0.4",
        "--policy",
        "lru",
        "--trace",
        file.to_str().unwrap(),
    ];
    let done = machine.program(&args, &[("CUDA_ON_CPU_LINK_MB_S", "2000")]);
    assert_eq!(done.code, Some(0), "{}", done.said);
    let trace = Trace::read(&file);
    trace.check();
    assert!(trace.text.contains("\"CUDA on the CPU\"") && !trace.text.contains("virtual clock"));
    let tokens = trace.host().iter().filter(|s| s.name == "token").count();
    let layers = trace.layers();
    let of = |name: &str| trace.device().iter().filter(|s| s.name == name).count();
    assert_eq!((tokens, of("head")), (15, 16));
    // In every layer of every pass; attention and exchange go over to the host and back, in some.
    assert!(
        of("exchange") >= 16 * layers && of("attention") >= 16 * layers,
        "{} and {}",
        of("exchange"),
        of("attention")
    );
    // In every layer that has slots.
    let halves: std::collections::BTreeSet<u64> =
        trace.device().iter().filter(|s| s.name == "FFN half").filter_map(|s| s.args["layer"].as_u64()).collect();
    assert!(!halves.is_empty() && of("FFN half") == 16 * halves.len(), "{} in {halves:?}", of("FFN half"));
    assert!(trace.overlap_of_halves_ns() > 0, "host and device took turns:\n{}", done.said);
    assert!(!trace.moves().is_empty(), "nothing moved:\n{}", done.said);
    assert!(done.said.contains("both computed") && done.said.contains("times the longer side"), "{}", done.said);
    assert!(done.said.contains("placed on the host's clock within"), "{}", done.said);
}
