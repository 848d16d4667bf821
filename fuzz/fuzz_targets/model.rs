//! Any bytes as a model, a GGUF that is read in place or a store with neuron blocks (as it is and put right): refused, or a token goes
//! through it.
#![no_main]

mod support;

use dynamicinfer::cpu::Kernels;
use dynamicinfer::engine::{Engine, Logits, Session};
use dynamicinfer::error::Result;
use dynamicinfer::formats::neuron_store::{MAGIC, NeuronStore};
use dynamicinfer::model::source::Source;
use dynamicinfer::model::{KvType, Model};
use libfuzzer_sys::fuzz_target;
use std::path::Path;

fn open(path: &Path) -> Result<Model> {
    let model = match NeuronStore::open(path) {
        Ok(store) => {
            store.verify(|_| ())?;
            Model::from_store(store)?
        }
        Err(_) => Model::in_place(Source::open(path, None)?)?,
    };
    model.check_numbers(false)?;
    Ok(model)
}

fn check(path: &Path) {
    let model = match open(path) {
        Ok(model) => model,
        Err(error) => {
            let message = error.to_string();
            assert!(!message.is_empty() && !message.contains(char::is_control), "{message:?}");
            return;
        }
    };
    let mut engine = Engine::new(model, 1, Kernels::best());
    let Ok(mut session) = Session::new(&engine, 2, KvType::F16) else { return };
    if session.check(&engine, &[0]).is_ok() {
        engine.forward(&mut session.kv, &[0], Logits::All);
        let _ = engine.answer();
    }
}

fuzz_target!(|bytes: &[u8]| {
    check(&support::file(bytes));
    if bytes.starts_with(&MAGIC)
        && let Some(right) = support::put_right(bytes, &MAGIC, |_| ())
    {
        check(&support::file(&right));
    }
});
