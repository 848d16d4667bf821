//! Models with random weights, of any shape: for measuring speed without a download. They are written directly as a neuron store, or as a
//! GGUF that other programs read, too. With a given share of active neurons they are sparse as `sparse` describes.

pub mod experts;
mod noise;
mod predict;
mod routing;
mod shape;
mod sparse;
pub mod trace;
mod weights;

pub use self::predict::{
    Distance, Draft, RANK as SMALLEST_RANK, Statistics, pack_draft, write_predictor, write_predictor_of_rank,
};
pub use self::routing::{Law, Routing};
pub use self::shape::{Mixture, Shape};

use self::noise::{ROWS_PER_TASK, SEGMENT, Stream};
use self::shape::{BYTE_TOKENS_END, RECIPE};
use self::weights::Weights;
use crate::error::{Error, Result};
use crate::formats::gguf_writer::{self, GgufWriter, Value};
use crate::formats::neuron_store::{Header, Writer};
use crate::formats::rows::{self, Quant};
use crate::model::BlockLayout;
use crate::model::config::{Activation, ModelConfig};
use crate::pack::{self, vector};
use crate::placement::shapes::{EPSILON, THETA};
use crate::tokenizer::{ChatSpec, ModelSpec, SpmSpec, TokenKind, TokenizerSpec};
use rayon::prelude::*;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// A vocabulary that can write any text: control tokens, every byte, and filler tokens that occur in no text.
fn tokenizer(vocab: usize) -> SpmSpec {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    let mut kinds = vec![TokenKind::Unknown, TokenKind::Control, TokenKind::Control];
    tokens.extend((0..256).map(|b| format!("<0x{b:02X}>")));
    kinds.extend([TokenKind::Byte; 256]);
    tokens.extend((BYTE_TOKENS_END..vocab).map(|i| format!("\u{2581}filler{i}")));
    kinds.resize(vocab, TokenKind::Normal);
    let scores = (0..vocab).map(|i| if i < BYTE_TOKENS_END { 0.0 } else { -(i as f32) }).collect();
    SpmSpec { tokens, scores, kinds, add_space_prefix: true, remove_extra_whitespaces: false }
}

/// Counts bytes and reports them; an error from `progress` ends the work.
struct Meter<'a> {
    done: AtomicU64,
    total: u64,
    progress: &'a (dyn Fn(u64, u64) -> Result<()> + Sync),
}

impl Meter<'_> {
    fn advance(&self, bytes: usize) -> Result<()> {
        let done = self.done.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
        (self.progress)(done.min(self.total), self.total)
    }
}

/// Fills `rows` rows of `cols` numbers: makes each with `row`, encodes it with `encode` and hands runs of them to
/// `write(first row, bytes)`.
fn fill(
    meter: &Meter<'_>,
    (rows, cols): (usize, usize),
    row_bytes: usize,
    row: impl Fn(usize, &mut [f32]) + Sync,
    encode: impl Fn(&[f32], &mut [u8]) + Sync,
    write: impl Fn(usize, &[u8]) -> Result<()> + Sync,
) -> Result<()> {
    (0..rows.div_ceil(ROWS_PER_TASK)).into_par_iter().try_for_each(|task| {
        let range = task * ROWS_PER_TASK..rows.min((task + 1) * ROWS_PER_TASK);
        let mut values = vec![0.0; cols];
        let mut bytes = vec![0; range.len() * row_bytes];
        for (r, out) in range.clone().zip(bytes.chunks_exact_mut(row_bytes)) {
            row(r, &mut values);
            encode(&values, out);
        }
        write(range.start, &bytes)?;
        meter.advance(bytes.len())
    })
}

fn check_groups(config: &ModelConfig, quant: Quant, sizes: &[usize]) -> Result<()> {
    let unit = quant.unit();
    if sizes.iter().any(|s| !s.is_multiple_of(unit)) {
        let why = format!("{} needs sizes that are multiples of {unit}", quant.name());
        return Err(Error::Usage(format!("{why}; --hidden is {}, --ffn {}", config.hidden, config.widest_ffn())));
    }
    Ok(())
}

/// Writes the model as a neuron store with weights of type `quant`. `progress(done, total)` is called with bytes, from several threads; an
/// error it returns ends the work.
///
/// # Errors
/// Those of `progress`; [`Error::Usage`] for a shape that cannot be; [`Error::Io`] where the file cannot be written.
pub fn write_store(
    shape: &Shape,
    quant: Quant,
    path: &Path,
    progress: &(dyn Fn(u64, u64) -> Result<()> + Sync),
) -> Result<()> {
    if shape.experts.is_some() {
        return Err(Error::Usage("--experts: a mixture is read where it lies; write a .gguf".into()));
    }
    let weights = Weights::new(shape)?;
    let c = &weights.config;
    let a = c.attention(0).expect("its layers have attention");
    check_groups(c, quant, &[c.hidden])?;
    let edge = quant.of_edges();
    let qkv = |r: usize| match (r, a.q_dim(), a.kv_dim()) {
        (r, q, _) if r < q => (Stream::Q, r),
        (r, q, kv) if r < q + kv => (Stream::K, r - q),
        (r, q, kv) => (Stream::V, r - q - kv),
    };
    let block = |r: usize| ([Stream::Gate, Stream::Up, Stream::Down][r % 3], r / 3);
    let attention = a.qkv_dim() * quant.row_bytes(c.hidden) + c.hidden * quant.row_bytes(a.q_dim());
    let layer_bytes = attention + c.widest_ffn() * BlockLayout::new(c.ffn_kind, quant, c.hidden).bytes();
    let total = (2 * c.vocab * edge.row_bytes(c.hidden) + c.layers().len() * layer_bytes) as u64;
    let meter = Meter { done: AtomicU64::new(0), total, progress };
    let mut writer = Writer::create(path)?;
    let matrix = |writer: &mut Writer,
                  name: &str,
                  layer: usize,
                  quant: Quant,
                  (rows, cols): (usize, usize),
                  place: &(dyn Fn(usize) -> (Stream, usize) + Sync)| {
        let section = writer.add_rows(name, quant, rows, cols);
        let row_bytes = quant.row_bytes(cols);
        let row = |r: usize, out: &mut [f32]| {
            let (stream, r) = place(r);
            weights.row(stream, layer, r, out);
        };
        let encode = |values: &[f32], out: &mut [u8]| rows::encode(quant, values, out);
        let write = |first: usize, bytes: &[u8]| writer.write(section, (first * row_bytes) as u64, bytes);
        fill(&meter, (rows, cols), row_bytes, row, encode, write).map(|()| section)
    };
    matrix(&mut writer, "embed", 0, edge, (c.vocab, c.hidden), &|r| (Stream::Embed, r))?;
    matrix(&mut writer, "head", 0, edge, (c.vocab, c.hidden), &|r| (Stream::Head, r))?;
    vector(&mut writer, "out_norm", &vec![1.0; c.hidden])?;
    for l in 0..c.layers().len() {
        let name = |part: &str| format!("layer.{l}.{part}");
        let norm = weights.norm(l);
        vector(&mut writer, &name("attn_norm"), &norm)?;
        vector(&mut writer, &name("ffn_norm"), &norm)?;
        matrix(&mut writer, &name("qkv"), l, quant, (a.qkv_dim(), c.hidden), &qkv)?;
        matrix(&mut writer, &name("o"), l, quant, (c.hidden, a.q_dim()), &|r| (Stream::O, r))?;
        let blocks = matrix(&mut writer, &name("ffn"), l, quant, (c.widest_ffn() * 3, c.hidden), &block)?;
        writer.add_checksums(blocks, &[3 * quant.row_bytes(c.hidden) as u64]);
    }
    let spec = TokenizerSpec {
        model: ModelSpec::Spm(tokenizer(c.vocab)),
        bos: Some(1),
        eos: vec![2],
        unk: Some(0),
        add_bos: true,
        add_eos: false,
        chat_template: None,
        chat: ChatSpec::default(),
    };
    pack::bytes(&mut writer, "tokenizer", &serde_json::to_vec(&spec).expect("plain data"))?;
    let config = serde_json::to_value(shape.described()?).expect("plain data");
    let planted = if shape.outliers > 0 { format!(" {}", shape.outliers) } else { String::new() };
    let identity = format!("synth {RECIPE} {} {:?} {} {config}{planted}", shape.seed, shape.active, quant.name());
    let fingerprint = format!("{:032x}", xxhash_rust::xxh3::xxh3_128(identity.as_bytes()));
    writer.finish(Header { fingerprint, sources: Vec::new(), quant, config, sections: Vec::new() })
}

/// Writes the model as a GGUF of the llama architecture. Programs that do not know the key `llama.hidden_act` run it with SiLU, which takes
/// the same time. `progress` and errors are those of [`write_store`].
pub fn write_gguf(
    shape: &Shape,
    quant: Quant,
    path: &Path,
    progress: &(dyn Fn(u64, u64) -> Result<()> + Sync),
) -> Result<()> {
    let weights = Weights::new(shape)?;
    let c = &weights.config;
    let a = c.attention(0).expect("its layers have attention");
    check_groups(c, quant, &[c.hidden, c.widest_ffn()])?;
    let edge = quant.of_edges();
    let mut writer = GgufWriter::new(path);
    metadata(&mut writer, c, quant);
    let mut tensors = Vec::new();
    let mut add = |name: String, stream: Stream, layer: usize, quant: Quant, shape: &[usize]| {
        let tensor = writer.add(&format!("{name}.weight"), quant, shape);
        tensors.push((tensor, stream, layer, quant, shape[..shape.len() - 1].iter().product(), shape[shape.len() - 1]));
    };
    add("token_embd".into(), Stream::Embed, 0, edge, &[c.vocab, c.hidden]);
    add("output".into(), Stream::Head, 0, edge, &[c.vocab, c.hidden]);
    for l in 0..c.layers().len() {
        for (part, stream, rows, cols) in [
            ("attn_q", Stream::Q, a.q_dim(), c.hidden),
            ("attn_k", Stream::K, a.kv_dim(), c.hidden),
            ("attn_v", Stream::V, a.kv_dim(), c.hidden),
            ("attn_output", Stream::O, c.hidden, a.q_dim()),
        ] {
            add(format!("blk.{l}.{part}"), stream, l, quant, &[rows, cols]);
        }
        for (part, stream, rows, cols) in [
            ("ffn_gate", Stream::Gate, c.widest_ffn(), c.hidden),
            ("ffn_up", Stream::Up, c.widest_ffn(), c.hidden),
            ("ffn_down", Stream::Down, c.hidden, c.widest_ffn()),
        ] {
            match shape.experts {
                Some(Mixture { count, .. }) => {
                    add(format!("blk.{l}.{part}_exps"), stream, l, quant, &[count, rows, cols])
                }
                None => add(format!("blk.{l}.{part}"), stream, l, quant, &[rows, cols]),
            }
        }
        if let Some(Mixture { count, .. }) = shape.experts {
            add(format!("blk.{l}.ffn_gate_inp"), Stream::Router, l, Quant::F32, &[count, c.hidden]);
        }
    }
    let mut norms = vec![writer.add("output_norm.weight", Quant::F32, &[c.hidden])];
    for l in 0..c.layers().len() {
        for part in ["attn_norm", "ffn_norm"] {
            norms.push(writer.add(&format!("blk.{l}.{part}.weight"), Quant::F32, &[c.hidden]));
        }
    }
    writer.begin()?;
    let bytes = |&(_, _, _, quant, rows, cols): &_| (rows * gguf_writer::row_bytes(quant, cols)) as u64;
    let meter = Meter { done: AtomicU64::new(0), total: tensors.iter().map(bytes).sum(), progress };
    // GGUF's order of a head's rows is that of interleaved RoPE: the pair (2i, 2i + 1) is (i, i + head_dim / 2) of ours.
    let dim = a.head_dim;
    let rotated = |r: usize| r / dim * dim + r % dim / 2 + r % 2 * (dim / 2);
    for &(tensor, stream, layer, quant, rows, cols) in &tensors {
        let row_bytes = gguf_writer::row_bytes(quant, cols);
        let encode = |values: &[f32], out: &mut [u8]| gguf_writer::encode_row(quant, values, out);
        let write = |first: usize, bytes: &[u8]| writer.write(tensor, first, bytes);
        if stream == Stream::Down {
            // Stored by output, while the numbers are generated by neuron: a segment of every neuron's row at a time.
            let each = c.hidden.div_ceil(SEGMENT);
            (0..rows / c.hidden * each).into_par_iter().try_for_each(|task| {
                let (expert, first) = (task / each, task % each * SEGMENT);
                let here = SEGMENT.min(c.hidden - first);
                let mut values = vec![0.0; here * cols];
                weights.down_by_output(layer, expert, first, &mut values);
                let mut bytes = vec![0; here * row_bytes];
                values.chunks_exact(cols).zip(bytes.chunks_exact_mut(row_bytes)).for_each(|(v, out)| encode(v, out));
                write(expert * c.hidden + first, &bytes)?;
                meter.advance(bytes.len())
            })?;
            continue;
        }
        let row = |r: usize, out: &mut [f32]| {
            let r = if matches!(stream, Stream::Q | Stream::K) { rotated(r) } else { r };
            weights.row(stream, layer, r, out);
        };
        fill(&meter, (rows, cols), row_bytes, row, encode, write)?;
    }
    // The output's, then two for each layer.
    for (i, norm) in norms.into_iter().enumerate() {
        let values = i.checked_sub(1).map_or_else(|| vec![1.0; c.hidden], |i| weights.norm(i / 2));
        writer.write(norm, 0, bytemuck::cast_slice(&values))?;
    }
    writer.finish()
}

fn metadata(writer: &mut GgufWriter, c: &ModelConfig, quant: Quant) {
    let spm = tokenizer(c.vocab);
    let kinds: Vec<i32> = spm
        .kinds
        .iter()
        .map(|kind| match kind {
            TokenKind::Unknown => 2,
            TokenKind::Control => 3,
            TokenKind::Byte => 6,
            _ => 1,
        })
        .collect();
    let activation = match c.activation {
        Activation::Fatrelu(_) => "fatrelu".to_string(),
        other => other.to_string(),
    };
    // llama.cpp's general.file_type.
    let file_type = match quant {
        Quant::F32 => 0,
        Quant::F16 => 1,
        Quant::Q4 => 2,
        Quant::Q8 => 7,
        // None of its numbers says that all matrices have one type of blocks.
        Quant::Block(_) => 1024,
    };
    let a = c.attention(0).expect("its layers have attention");
    let sizes = [
        ("context_length", c.context),
        ("embedding_length", c.hidden),
        ("block_count", c.layers().len()),
        ("feed_forward_length", c.widest_ffn()),
        ("attention.head_count", a.heads),
        ("attention.head_count_kv", a.kv_heads),
        ("rope.dimension_count", a.head_dim),
        ("vocab_size", c.vocab),
    ];
    writer.set("general.architecture", Value::Str("llama"));
    writer.set("general.name", Value::Str(&c.name));
    writer.set("general.file_type", Value::U32(file_type));
    let experts = c.mixtures().next().map(|e| [("expert_count", e.count), ("expert_used_count", e.used)]);
    for (key, value) in sizes.into_iter().chain(experts.into_iter().flatten()) {
        writer.set(&format!("llama.{key}"), Value::U32(value as u32));
    }
    writer.set("llama.attention.layer_norm_rms_epsilon", Value::F32(EPSILON));
    writer.set("llama.rope.freq_base", Value::F32(THETA as f32));
    writer.set("llama.hidden_act", Value::Str(&activation));
    if let Activation::Fatrelu(threshold) = c.activation {
        writer.set("llama.hidden_act_param", Value::F32(threshold));
    }
    writer.set("tokenizer.ggml.model", Value::Str("llama"));
    writer.set("tokenizer.ggml.tokens", Value::Strings(&spm.tokens));
    writer.set("tokenizer.ggml.scores", Value::F32s(&spm.scores));
    writer.set("tokenizer.ggml.token_type", Value::I32s(&kinds));
    writer.set("tokenizer.ggml.bos_token_id", Value::U32(1));
    writer.set("tokenizer.ggml.eos_token_id", Value::U32(2));
    writer.set("tokenizer.ggml.unknown_token_id", Value::U32(0));
    writer.set("tokenizer.ggml.add_bos_token", Value::Bool(true));
}
