//! The library alone: opens the demo model with a virtual device and prints what it says. `cargo run --example embed`

use dynamicinfer::engine::sampler::{Sampler, SamplingParams};
use dynamicinfer::open::{DeviceKind, DeviceOptions, EngineOptions, Opened, Quiet, open};
use dynamicinfer::tokenizer::{Special, stream::TextStream};

fn main() -> dynamicinfer::Result<()> {
    let mut device = DeviceOptions::new(DeviceKind::Virtual);
    device.ffn_share = Some(0.3);
    device.machine = Some("demo-pc".into());
    (device.history, device.learn) = (false, false);
    let opened = open(&EngineOptions { device: Some(device), ..EngineOptions::new("demo") }, &Quiet)?;
    let (tokenizer, mut session) = (opened.tokenizer()?, opened.session()?);
    let Opened { mut engine, .. } = opened;

    let prompt = tokenizer.encode_prompt("Once upon a time", Special::AsText)?;
    let mut sampler = Sampler::new(SamplingParams { seed: 1, ..SamplingParams::default() }, engine.model.config.vocab)?;
    let mut text = TextStream::continuation(&[])?;
    let mut logits = session.append(&mut engine, &prompt, |_| Ok(()))?;
    for _ in 0..64 {
        let token = sampler.sample(logits);
        if tokenizer.is_end(token) {
            break;
        }
        sampler.accept(token);
        print!("{}", text.push(tokenizer.token_bytes(token).unwrap_or_default()).text);
        logits = session.append(&mut engine, &[token], |_| Ok(()))?;
    }
    println!("{}", text.finish().text);
    Ok(())
}
