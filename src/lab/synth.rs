//! Models with random weights of any shape: for measuring speed without a download. Written straight to a neuron store,
//! or to a GGUF that other programs read too.

use super::pack::{self, vector};
use crate::error::{Error, Result};
use crate::formats::gguf_writer::{self, GgufWriter, Value};
use crate::formats::neuron_store::{Header, Writer};
use crate::formats::rows::{self, GROUP, Quant};
use crate::model::config::{Activation, Ffn, ModelConfig, Norm, Positions, RopeScaling, rope_frequencies};
use crate::prng::Prng;
use crate::tokenizer::{ModelSpec, SpmSpec, TokenKind, TokenizerSpec};
use rayon::prelude::*;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

const ROWS_PER_TASK: usize = 256;
const THETA: f32 = 10_000.0;
const EPSILON: f32 = 1e-5;

/// The shape of a synthetic model.
pub struct Shape {
    pub hidden: usize,
    pub layers: usize,
    pub ffn: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub vocab: usize,
    pub context: usize,
    pub activation: Activation,
    pub seed: u64,
}

impl Shape {
    pub fn config(&self) -> Result<ModelConfig> {
        let usage = |why: String| Error::Usage(why);
        if self.heads == 0 || !self.hidden.is_multiple_of(self.heads) {
            return Err(usage(format!("--hidden {} is not a multiple of --heads {}", self.hidden, self.heads)));
        }
        if self.vocab < BYTE_TOKENS_END {
            return Err(usage(format!(
                "--vocab {} is below {BYTE_TOKENS_END}: three control tokens and 256 bytes",
                self.vocab
            )));
        }
        let head_dim = self.hidden / self.heads;
        let config = ModelConfig {
            family: "llama".into(),
            name: format!("synth-{}x{}x{}", self.hidden, self.layers, self.ffn),
            hidden: self.hidden,
            layers: self.layers,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim,
            ffn: self.ffn,
            vocab: self.vocab,
            context: self.context,
            window: None,
            norm: Norm::Rms(EPSILON),
            activation: self.activation,
            ffn_kind: Ffn::Gated,
            positions: Positions::Rope { frequencies: rope_frequencies(head_dim, THETA as f64, &RopeScaling::None) },
            attention_bias: false,
            output_bias: false,
            ffn_bias: false,
            tied: false,
        };
        config.check().map_err(usage)?;
        Ok(config)
    }
}

const BYTE_TOKENS_END: usize = 3 + 256;

/// A vocabulary that can write any text: control tokens, every byte, and fillers that no text contains.
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

/// Uniform numbers with the deviation that keeps a layer's outputs about as large as its inputs. Row `r` of matrix
/// `stream` is the same whatever the order of work.
fn random_row(seed: u64, stream: u64, r: usize, deviation: f32, out: &mut [f32]) {
    let mut rng = Prng::new(seed ^ stream.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (r as u64).rotate_left(32));
    let scale = deviation * 3f32.sqrt() / (1u32 << 31) as f32;
    for pair in out.chunks_mut(2) {
        let bits = rng.next_u64();
        pair[0] = (bits as u32 as i32) as f32 * scale;
        if let Some(second) = pair.get_mut(1) {
            *second = ((bits >> 32) as u32 as i32) as f32 * scale;
        }
    }
}

/// Fills `rows` rows of `cols` numbers: encodes each with `encode` and hands runs of them to `write(first row, bytes)`.
fn fill(
    meter: &Meter<'_>,
    (seed, stream): (u64, u64),
    (rows, cols): (usize, usize),
    row_bytes: usize,
    encode: impl Fn(&[f32], &mut [u8]) + Sync,
    write: impl Fn(usize, &[u8]) -> Result<()> + Sync,
) -> Result<()> {
    let deviation = 1.0 / (cols as f32).sqrt();
    (0..rows.div_ceil(ROWS_PER_TASK)).into_par_iter().try_for_each(|task| {
        let range = task * ROWS_PER_TASK..rows.min((task + 1) * ROWS_PER_TASK);
        let mut values = vec![0.0; cols];
        let mut bytes = vec![0; range.len() * row_bytes];
        for (r, out) in range.clone().zip(bytes.chunks_exact_mut(row_bytes)) {
            random_row(seed, stream, r, deviation, &mut values);
            encode(&values, out);
        }
        write(range.start, &bytes)?;
        meter.advance(bytes.len())
    })
}

fn check_groups(config: &ModelConfig, quant: Quant, sizes: &[usize]) -> Result<()> {
    if quant.is_grouped() && sizes.iter().any(|s| !s.is_multiple_of(GROUP)) {
        let why = format!("{} needs sizes that are multiples of {GROUP}", quant.name());
        return Err(Error::Usage(format!("{why}; --hidden is {}, --ffn {}", config.hidden, config.ffn)));
    }
    Ok(())
}

/// Writes a neuron store.
pub fn write_store(
    shape: &Shape,
    quant: Quant,
    path: &Path,
    progress: &(dyn Fn(u64, u64) -> Result<()> + Sync),
) -> Result<()> {
    let c = shape.config()?;
    check_groups(&c, quant, &[c.hidden])?;
    let edge = if quant == Quant::Q4 { Quant::Q8 } else { quant };
    let matrices = |l: usize| {
        [
            (format!("layer.{l}.qkv"), c.qkv_dim(), c.hidden),
            (format!("layer.{l}.o"), c.hidden, c.q_dim()),
            (format!("layer.{l}.ffn"), c.ffn * 3, c.hidden),
        ]
    };
    let layer: usize = matrices(0).iter().map(|(_, rows, cols)| rows * quant.row_bytes(*cols)).sum();
    let total = (2 * c.vocab * edge.row_bytes(c.hidden) + c.layers * layer) as u64;
    let meter = Meter { done: AtomicU64::new(0), total, progress };
    let mut writer = Writer::create(path)?;
    let mut stream = 0;
    let mut matrix = |writer: &mut Writer, name: &str, quant: Quant, rows: usize, cols: usize| {
        let section = writer.add_rows(name, quant, rows, cols);
        let row_bytes = quant.row_bytes(cols);
        stream += 1;
        let encode = |values: &[f32], out: &mut [u8]| rows::encode(quant, values, out);
        let write = |first: usize, bytes: &[u8]| writer.write(section, (first * row_bytes) as u64, bytes);
        fill(&meter, (shape.seed, stream), (rows, cols), row_bytes, encode, write)
    };
    matrix(&mut writer, "embed", edge, c.vocab, c.hidden)?;
    matrix(&mut writer, "head", edge, c.vocab, c.hidden)?;
    let ones = vec![1.0; c.hidden];
    vector(&mut writer, "out_norm", &ones)?;
    for l in 0..c.layers {
        vector(&mut writer, &format!("layer.{l}.attn_norm"), &ones)?;
        vector(&mut writer, &format!("layer.{l}.ffn_norm"), &ones)?;
        for (name, rows, cols) in matrices(l) {
            matrix(&mut writer, &name, quant, rows, cols)?;
        }
    }
    let spec = TokenizerSpec {
        model: ModelSpec::Spm(tokenizer(c.vocab)),
        bos: Some(1),
        eos: vec![2],
        unk: Some(0),
        add_bos: true,
        add_eos: false,
        chat_template: None,
    };
    pack::bytes(&mut writer, "tokenizer", &serde_json::to_vec(&spec).expect("plain data"))?;
    let config = serde_json::to_value(&c).expect("plain data");
    let identity = format!("synth {} {config}", shape.seed);
    let fingerprint = format!("{:032x}", xxhash_rust::xxh3::xxh3_128(identity.as_bytes()));
    writer.finish(Header { fingerprint, sources: Vec::new(), quant, config, sections: Vec::new() })
}

/// Writes a GGUF of the llama architecture. Programs that do not know the key `llama.hidden_act` run it with SiLU, which
/// takes the same time.
pub fn write_gguf(
    shape: &Shape,
    quant: Quant,
    path: &Path,
    progress: &(dyn Fn(u64, u64) -> Result<()> + Sync),
) -> Result<()> {
    let c = shape.config()?;
    check_groups(&c, quant, &[c.hidden, c.ffn])?;
    let edge = if quant == Quant::Q4 { Quant::Q8 } else { quant };
    let mut writer = GgufWriter::new(path);
    metadata(&mut writer, &c, quant);
    let mut tensors = Vec::new();
    let mut add = |writer: &mut GgufWriter, name: String, quant: Quant, rows: usize, cols: usize| {
        let tensor = writer.add(&name, quant, &[rows, cols]);
        tensors.push((tensor, quant, rows, cols));
    };
    add(&mut writer, "token_embd.weight".into(), edge, c.vocab, c.hidden);
    add(&mut writer, "output.weight".into(), edge, c.vocab, c.hidden);
    for l in 0..c.layers {
        for (part, rows, cols) in [
            ("attn_q", c.q_dim(), c.hidden),
            ("attn_k", c.kv_dim(), c.hidden),
            ("attn_v", c.kv_dim(), c.hidden),
            ("attn_output", c.hidden, c.q_dim()),
            ("ffn_gate", c.ffn, c.hidden),
            ("ffn_up", c.ffn, c.hidden),
            ("ffn_down", c.hidden, c.ffn),
        ] {
            add(&mut writer, format!("blk.{l}.{part}.weight"), quant, rows, cols);
        }
    }
    let mut norms = vec![writer.add("output_norm.weight", Quant::F32, &[c.hidden])];
    for l in 0..c.layers {
        for part in ["attn_norm", "ffn_norm"] {
            norms.push(writer.add(&format!("blk.{l}.{part}.weight"), Quant::F32, &[c.hidden]));
        }
    }
    writer.begin()?;
    let total = tensors.iter().map(|&(_, quant, rows, cols)| (rows * gguf_writer::row_bytes(quant, cols)) as u64).sum();
    let meter = Meter { done: AtomicU64::new(0), total, progress };
    for &(tensor, quant, rows, cols) in &tensors {
        let encode = |values: &[f32], out: &mut [u8]| gguf_writer::encode_row(quant, values, out);
        let write = |first: usize, bytes: &[u8]| writer.write(tensor, first, bytes);
        let row_bytes = gguf_writer::row_bytes(quant, cols);
        fill(&meter, (shape.seed, tensor as u64), (rows, cols), row_bytes, encode, write)?;
    }
    let ones: Vec<u8> = (0..c.hidden).flat_map(|_| 1f32.to_le_bytes()).collect();
    for norm in norms {
        writer.write(norm, 0, &ones)?;
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
    };
    let sizes = [
        ("context_length", c.context),
        ("embedding_length", c.hidden),
        ("block_count", c.layers),
        ("feed_forward_length", c.ffn),
        ("attention.head_count", c.heads),
        ("attention.head_count_kv", c.kv_heads),
        ("rope.dimension_count", c.head_dim),
        ("vocab_size", c.vocab),
    ];
    writer.set("general.architecture", Value::Str("llama"));
    writer.set("general.name", Value::Str(&c.name));
    writer.set("general.file_type", Value::U32(file_type));
    for (key, value) in sizes {
        writer.set(&format!("llama.{key}"), Value::U32(value as u32));
    }
    writer.set("llama.attention.layer_norm_rms_epsilon", Value::F32(EPSILON));
    writer.set("llama.rope.freq_base", Value::F32(THETA));
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
