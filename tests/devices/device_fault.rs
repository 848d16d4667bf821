//! A device that fails for good in the middle of a text: an error at the end of the pass, no number that could be taken for an answer,
//! and nothing that waits for ever.

use crate::support::{RATES, on_device, packed, streaming};
use dynamicinfer::Error;
use dynamicinfer::cpu::Kernels;
use dynamicinfer::device::VirtualDevice;
use dynamicinfer::engine::{Choice, Engine, Logits, Session, Sparsity, Split};
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::ids::{SlotId, StoreId};
use dynamicinfer::model::{KvType, Model};
use std::process::Command;

/// An engine whose every layer has half of its neurons on a device that fails at this launch.
fn engine(dir: &std::path::Path, fails_at: u64) -> Engine {
    let model = Model::open(&packed(dir, "relullama", Quant::F32)).unwrap();
    let (layers, slots) =
        (model.config.layers().len(), vec![model.config.widest_ffn() / 2; model.config.layers().len()]);
    let device = VirtualDevice::new(u64::MAX, RATES).failing_at(fails_at);
    // SAFETY: the engine drops its device's part before its model.
    let mut split = unsafe { on_device(&model, Box::new(device), &slots) }.unwrap();
    let neurons: Vec<u32> = (0..slots[0] as u32).collect();
    (0..layers).for_each(|l| split.cache.load(&mut *split.device, l, bytemuck::cast_slice(&neurons)).unwrap());
    split.cache.settle(&mut *split.device);
    let mut engine = Engine::new(model, 1, Kernels::best());
    engine.set_sparsity(Sparsity::new(vec![Choice::Exact { activation_threshold: 0.0 }; layers], 0).unwrap());
    engine.split = Some(split);
    engine
}

#[test]
fn a_fault_ends_the_pass_with_an_error_and_leaves_no_number() {
    let dir = tempfile::tempdir().unwrap();
    for fails_at in [1, 2, 5, 9] {
        let mut engine = engine(dir.path(), fails_at);
        let mut session = Session::new(&engine, 32, KvType::F32).unwrap();
        let mut passes = 0;
        let error = loop {
            match session.append(&mut engine, &[5 + passes], |_| Ok(())) {
                Ok(logits) => assert!(logits.iter().all(|logit| logit.is_finite())),
                Err(error) => break error,
            }
            passes += 1;
            assert!(passes < 20, "launch {fails_at} never failed");
        };
        assert_eq!(
            error.to_string(),
            format!("the device has failed: virtual device: launch {fails_at} failed, as it was told to; run again")
        );
        assert!(matches!(error, Error::Fatal(_)) && error.exit_code() == 70);
        let logits = engine.forward(&mut session.kv, &[7], Logits::Last);
        assert!(!logits.is_empty() && logits.iter().all(|logit| logit.is_nan()));
        assert!(engine.answer().is_err());
        // Every way to wait for it comes back: moves that were on their way, another budget, the end.
        let Split { device, cache, .. } = engine.split.as_mut().unwrap();
        cache.barrier = true;
        cache.migrate_all(&mut **device, 0, None, [(SlotId(0), StoreId(40))].into_iter());
        cache.commit(&mut **device, 0);
        cache.settle(&mut **device);
        assert_eq!(cache.in_flight(), 0);
        let fewer: Vec<usize> = cache.slots().iter().map(|slots| slots / 2).collect();
        cache.resize(&mut **device, &fewer).unwrap();
        drop(engine);
    }
}

#[test]
fn a_fault_in_the_middle_of_a_prompt_ends_it_with_an_error() {
    let dir = tempfile::tempdir().unwrap();
    for fails_at in [1, 3, 6, 9, 14, 20, 27] {
        let mut engine = engine(dir.path(), fails_at);
        let model = engine.model.clone();
        // Half of what is in no slot is copied for the prompt, a few blocks at a time, the other half is the CPU's.
        streaming(engine.split.as_mut().unwrap(), &model, 8, 0.5);
        let prompt: Vec<u32> = (0..200).map(|i| 5 + i * 37 % 90).collect();
        let mut session = Session::new(&engine, 256, KvType::F16).unwrap();
        let error = session.append(&mut engine, &prompt, |_| Ok(())).unwrap_err();
        assert!(matches!(error, Error::Fatal(_)) && error.to_string().contains(&format!("launch {fails_at} failed")));
        assert!(engine.logits().iter().all(|logit| logit.is_nan()));
    }
}

#[test]
fn without_the_fault_the_same_engine_answers() {
    let dir = tempfile::tempdir().unwrap();
    let mut engine = engine(dir.path(), u64::MAX);
    let mut session = Session::new(&engine, 32, KvType::F32).unwrap();
    for token in 5..15 {
        session.append(&mut engine, &[token], |_| Ok(())).unwrap();
    }
    assert!(engine.split.as_ref().unwrap().device.totals().launches > 9, "the faults above were never reached");
}

#[test]
fn a_text_that_a_fault_ends_exits_with_70_and_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let cache = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("faults-cache");
    let mut command = Command::new(env!("CARGO_BIN_EXE_dynamicinfer-lab"));
    command.args(["run", "demo", "Once upon a time", "--temp", "0", "-n", "60", "--ignore-eos"]);
    command.args(["--device", "virtual", "--ffn-share", "0.5", "--machine", "demo-pc", "--fail-after", "29"]);
    command.env("XDG_CACHE_HOME", cache).env("HOME", dir.path()).current_dir(dir.path());
    let done = command.output().unwrap();
    let said = String::from_utf8(done.stderr).unwrap();
    assert_eq!(done.status.code(), Some(70), "{said}");
    let last = said.lines().last().unwrap();
    assert!(
        last.ends_with("the device has failed: virtual device: launch 30 failed, as it was told to; run again"),
        "{said}"
    );
}
