//! An engine that is opened from plain options, as an embedding program does.

use crate::support::packed;
use dynamicinfer::Error;
use dynamicinfer::cache::Tier;
use dynamicinfer::engine::Logits;
use dynamicinfer::engine::sampler::argmax;
use dynamicinfer::formats::rows::Quant;
use dynamicinfer::model::{KvCache, KvType};
use dynamicinfer::open::{DeviceKind, DeviceOptions, EngineOptions, Listener, Opened, Quiet, open};
use dynamicinfer::predictor::Kind;
use std::cell::RefCell;
use std::path::Path;

fn on_device(share: Option<f64>) -> Option<DeviceOptions> {
    let machine = Path::new(env!("CARGO_MANIFEST_DIR")).join("profiles/machines/demo-pc.toml");
    let virtual_device = DeviceOptions::new(DeviceKind::Virtual);
    Some(DeviceOptions { ffn_share: share, machine: Some(machine), history: false, ..virtual_device })
}

/// Keeps what it is told.
#[derive(Default)]
struct Heard(RefCell<Vec<String>>);

impl Listener for Heard {
    fn note(&self, text: &str) {
        self.0.borrow_mut().push(text.to_owned());
    }
}

/// The likeliest tokens after these.
fn continued(options: &EngineOptions) -> Vec<u32> {
    let opened = open(options, &Quiet).unwrap();
    let mut session = opened.session().unwrap();
    let Opened { mut engine, device, .. } = opened;
    assert_eq!(device.is_some(), options.device.is_some());
    let mut tokens = vec![1, 2, 3];
    for at in 0..24 {
        let next =
            argmax(session.append(&mut engine, &tokens[if at == 0 { 0 } else { at + 2 }..], |_| Ok(())).unwrap());
        tokens.push(next.expect("logits are numbers"));
    }
    if let Some(device) = device {
        assert!(
            engine.split.as_ref().unwrap().cache.counters.computed[Tier::Device] > 0,
            "nothing was computed on the device"
        );
        device.budget.set(&mut engine, 1).unwrap_err();
        device.finish(&mut engine);
    }
    tokens
}

#[test]
fn an_engine_with_a_device_is_opened_without_a_command_line_and_says_what_the_processor_says() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = EngineOptions::new(packed(dir.path(), "llama-relu2", Quant::F32));
    options.context = Some(64);
    options.sparsity.predictor = Kind::Exact.into();
    let alone = continued(&options);
    options.device = on_device(Some(0.5));
    assert_eq!(continued(&options), alone);
}

/// Two measurements of this machine differ, and by them the model was divided otherwise at each load: the last digits of a text differed.
#[test]
fn a_deterministic_division_is_not_by_what_was_measured_this_time() {
    let dir = tempfile::tempdir().unwrap();
    let mut options = EngineOptions::new(packed(dir.path(), "llama-relu2", Quant::F32));
    options.context = Some(64);
    options.sparsity.predictor = Kind::Exact.into();
    let with = |deterministic| Some(DeviceOptions { machine: None, deterministic, ..on_device(Some(0.5)).unwrap() });
    let divided = |options: &EngineOptions| {
        let heard = Heard::default();
        let Opened { device, mut engine, .. } = open(options, &heard).unwrap();
        let mut kv = KvCache::new(&engine.model.config, 64, KvType::F16).unwrap();
        let logits: Vec<u32> =
            engine.forward(&mut kv, &[5, 6, 7, 8], Logits::All).iter().map(|x| x.to_bits()).collect();
        (device.unwrap().budget.machine, logits, heard.0.into_inner().join("\n"))
    };
    options.device = with(true);
    let ((first, logits, told), (again, same, _)) = (divided(&options), divided(&options));
    assert_eq!(first, again);
    assert!(logits == same, "two loads answer differently");
    assert!(!told.contains("measuring"), "{told}");
    // Where a profile is saved, as after `measure --save default`, there is nothing to be told.
    assert!(dynamicinfer::open::machine::saved(&Quiet).is_some() || told.contains("rtx-3060-12gb"), "{told}");
}

#[test]
fn options_that_cannot_be_are_refused_in_words() {
    let dir = tempfile::tempdir().unwrap();
    let options =
        EngineOptions { context: Some(64), ..EngineOptions::new(packed(dir.path(), "llama-relu2", Quant::F32)) };
    let refused = |options: EngineOptions| match open(&options, &Quiet) {
        Err(Error::Usage(why)) => why,
        Err(other) => panic!("{other:?}"),
        Ok(_) => panic!("was opened"),
    };
    assert!(refused(EngineOptions::new("nowhere")).contains("there is no model at 'nowhere'"));
    assert!(refused(EngineOptions { threads: Some(0), ..options.clone() }).contains("take 1 to 1024"));
    assert!(refused(EngineOptions { device: on_device(None), ..options.clone() }).contains("needs a budget"));
    assert!(refused(EngineOptions { device: on_device(Some(2.0)), ..options }).contains("above 0 and at most 1"));
}

/// The library prints nothing: what it has to say goes to who opened the engine.
#[test]
fn what_is_odd_about_the_options_is_told_to_the_listener() {
    let dir = tempfile::tempdir().unwrap();
    let options =
        EngineOptions { context: Some(1 << 16), ..EngineOptions::new(packed(dir.path(), "llama-relu2", Quant::F32)) };
    let heard = Heard::default();
    assert_eq!(open(&options, &heard).unwrap().context, 1 << 16);
    assert!(heard.0.borrow().iter().any(|note| note.contains("is beyond the")), "{:?}", heard.0);
}
