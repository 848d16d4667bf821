//! The tokenizer of a Hugging Face model directory, from whichever of its files are there.

use super::hf::{self, HfVocab};
use super::sentencepiece;
use super::spec::{self, BpeSpec, ChatSpec, Keys, ModelSpec, SpmSpec, TokenKind, TokenizerSpec};
use crate::error::{Error, Result};
use crate::formats::{MappedFile, json};
use serde_json::Value;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The largest `tokenizer_config.json` in use has 1.2 MB (a thousand added tokens).
const MAX_CONFIG: u64 = 16 << 20;
/// The largest `tokenizer.model` in use (Gemma) has 4.7 MB.
const MAX_MODEL: u64 = 64 << 20;

const KEYS: Keys = Keys {
    tokens: "vocabulary",
    scores: "scores",
    kinds: "types",
    bos: "bos_token",
    eos: "eos_token",
    unk: "unk_token",
};

/// The small JSON files beside the vocabulary; any may be missing.
struct Configs {
    tokenizer: Value,
    special: Value,
    generation: Value,
    model: Value,
}

/// The tokenizer of a model directory: `tokenizer.json`, else `tokenizer.model`, else `vocab.json` with `merges.txt` (as OPT has it),
/// together with what the configuration files beside it say.
///
/// # Errors
/// [`Error::BadFile`] that names the file and the field; [`Error::Io`] for a file that is there but cannot be read.
pub fn from_hf_dir(dir: &Path) -> Result<TokenizerSpec> {
    let configs = Configs {
        tokenizer: read_json(&dir.join("tokenizer_config.json"))?,
        special: read_json(&dir.join("special_tokens_map.json"))?,
        generation: read_json(&dir.join("generation_config.json"))?,
        model: read_json(&dir.join("config.json"))?,
    };
    let mut spec = if let Some((path, json)) = read_text(dir, "tokenizer.json", hf::MAX_JSON)? {
        let vocab = hf::read(&json, &path)?;
        from_vocab(ModelSpec::HfJson { json }, &vocab, &configs, &path)?
    } else if let Some((path, file)) = open(dir, "tokenizer.model", MAX_MODEL)? {
        from_sentencepiece(file.bytes(), &path, dir, &configs)?
    } else if let Some((path, vocab)) = read_text(dir, "vocab.json", hf::MAX_JSON)? {
        from_vocab_and_merges(&vocab, &path, dir, &configs)?
    } else {
        let reason = "there is no tokenizer.json, tokenizer.model or vocab.json; download the model's tokenizer files";
        return Err(Error::bad(dir, "", reason));
    };
    spec.chat_template = chat_template(dir, &configs)?;
    spec::drop_repeated(&mut spec.eos);
    Ok(spec)
}

fn from_vocab(model: ModelSpec, vocab: &HfVocab, configs: &Configs, path: &Path) -> Result<TokenizerSpec> {
    let id_of = |text: &str| vocab.id_of(text);
    let bos = named_token(configs, "bos", &id_of).or(vocab.before);
    let special = (0..).zip(&vocab.tokens).filter(|(_, token)| token.kind != TokenKind::Normal);
    let mut eos = end_tokens(configs, &id_of);
    eos.extend(spec::ends_of_turns(special.map(|(id, token)| (id, &*token.text))));
    let stated = configs.tokenizer.get("add_bos_token").and_then(Value::as_bool);
    let mut spec = TokenizerSpec {
        model,
        add_bos: bos.is_some() && stated.unwrap_or(vocab.before.is_some() && vocab.before == bos),
        bos,
        eos,
        unk: token_text(configs, "unk").and_then(&id_of).or(vocab.unk),
        add_eos: false,
        chat_template: None,
        chat: chat_tokens(configs, &id_of),
    };
    spec::drop_unknown_ids(&mut spec, vocab.tokens.len(), &KEYS, path);
    Ok(spec)
}

fn from_sentencepiece(bytes: &[u8], path: &Path, dir: &Path, configs: &Configs) -> Result<TokenizerSpec> {
    let mut model = sentencepiece::read(bytes, path)?;
    add_tokens(&mut model.spec.tokens, &mut model.spec.kinds, dir, configs)?;
    model.spec.scores.resize(model.spec.tokens.len(), 0.0);
    let SpmSpec { tokens, .. } = &model.spec;
    let id_of = |text: &str| tokens.iter().position(|t| t == text).map(|id| id as u32);
    let mut eos = end_tokens(configs, &id_of);
    eos.extend(model.eos.filter(|_| eos.is_empty()));
    let bos = named_token(configs, "bos", &id_of).or(model.bos);
    let stated = configs.tokenizer.get("add_bos_token").and_then(Value::as_bool);
    let spec = TokenizerSpec {
        bos,
        eos,
        unk: model.unk,
        add_bos: bos.is_some() && stated.unwrap_or(true),
        add_eos: configs.tokenizer.get("add_eos_token").and_then(Value::as_bool).unwrap_or(false),
        chat_template: None,
        chat: chat_tokens(configs, &id_of),
        model: ModelSpec::Spm(model.spec),
    };
    checked(spec, path)
}

/// `vocab.json` and `merges.txt`: GPT-2's files, its pre-tokeniser, and no other known model family without a
/// `tokenizer.json`.
fn from_vocab_and_merges(vocab: &str, path: &Path, dir: &Path, configs: &Configs) -> Result<TokenizerSpec> {
    let Some((_, merges)) = read_text(dir, "merges.txt", hf::MAX_JSON)? else {
        return Err(Error::bad(dir, "merges.txt", "vocab.json is there and merges.txt is not; download it too"));
    };
    let merges = merges.lines().filter(|l| !l.starts_with("#version") && !l.is_empty()).map(str::to_owned).collect();
    let (mut tokens, mut kinds) = (Vec::new(), Vec::new());
    place_tokens(vocab, path, TokenKind::Normal, &mut tokens, &mut kinds)?;
    add_tokens(&mut tokens, &mut kinds, dir, configs)?;
    for key in ["bos", "eos", "unk", "pad"] {
        if let Some(text) = token_text(configs, key)
            && let Some(id) = tokens.iter().position(|t| t == text)
        {
            kinds[id] = TokenKind::Control;
        }
    }
    let id_of = |text: &str| tokens.iter().position(|t| t == text).map(|id| id as u32);
    let bos = named_token(configs, "bos", &id_of);
    let spec = TokenizerSpec {
        bos,
        eos: end_tokens(configs, &id_of),
        unk: named_token(configs, "unk", &id_of),
        add_bos: bos.is_some() && configs.tokenizer.get("add_bos_token").is_some_and(|v| v == true),
        add_eos: false,
        chat_template: None,
        chat: chat_tokens(configs, &id_of),
        model: ModelSpec::Bpe(BpeSpec { tokens, merges, kinds, pre: "gpt-2".into() }),
    };
    checked(spec, path)
}

fn checked(mut spec: TokenizerSpec, path: &Path) -> Result<TokenizerSpec> {
    let tokens = spec.vocab_len(path)?;
    spec::drop_unknown_ids(&mut spec, tokens, &KEYS, path);
    spec::check(&spec, &KEYS, path)?;
    spec::add_end_texts(&mut spec);
    Ok(spec)
}

/// Tokens that were added to a finished vocabulary: `added_tokens.json`, and `added_tokens_decoder` in the configuration.
fn add_tokens(tokens: &mut Vec<String>, kinds: &mut Vec<TokenKind>, dir: &Path, configs: &Configs) -> Result<()> {
    if let Some((path, json)) = read_text(dir, "added_tokens.json", MAX_CONFIG)? {
        let first = tokens.len();
        place_tokens(&json, &path, TokenKind::UserDefined, tokens, kinds)?;
        for id in first..tokens.len() {
            if spec::looks_like_control(&tokens[id]) {
                kinds[id] = TokenKind::Control;
            }
        }
    }
    let decoder = configs.tokenizer.get("added_tokens_decoder").and_then(Value::as_object);
    for (id, token) in decoder.into_iter().flatten() {
        let special = token.get("special").and_then(Value::as_bool).unwrap_or(false);
        let (Ok(id), Some(text)) = (id.parse::<usize>(), token.get("content").and_then(Value::as_str)) else {
            continue;
        };
        match tokens.get(id) {
            Some(known) if known == text && special && kinds[id] == TokenKind::Normal => kinds[id] = TokenKind::Control,
            None if id == tokens.len() => {
                tokens.push(text.to_owned());
                kinds.push(if special { TokenKind::Control } else { TokenKind::UserDefined });
            }
            _ => {}
        }
    }
    Ok(())
}

/// Puts the tokens of a JSON object of texts and ids in their places.
fn place_tokens(
    json: &str,
    path: &Path,
    kind: TokenKind,
    tokens: &mut Vec<String>,
    kinds: &mut Vec<TokenKind>,
) -> Result<()> {
    let map: std::collections::HashMap<String, u32> = serde_json::from_str(json)
        .map_err(|e| Error::bad(path, "", format!("not an object of tokens and ids: {e}")))?;
    let most = tokens.len() + 4 * map.len() + 65_536;
    for (text, id) in map {
        let at = id as usize;
        if at >= most.min(spec::MAX_TOKENS) {
            return Err(Error::bad(path, text, format!("token {id} is out of range")));
        }
        if at >= tokens.len() {
            tokens.resize(at + 1, String::new());
            kinds.resize(at + 1, TokenKind::Unused);
        }
        if kinds[at] != TokenKind::Unused && tokens[at] != text {
            return Err(Error::bad(path, text, format!("token {id} is \"{}\" already", tokens[at])));
        }
        if kinds[at] == TokenKind::Unused {
            kinds[at] = kind;
        }
        tokens[at] = text;
    }
    Ok(())
}

/// The text of `bos_token` and the like: a string, or an object with `content`.
fn token_text<'a>(configs: &'a Configs, name: &str) -> Option<&'a str> {
    let key = format!("{name}_token");
    [&configs.tokenizer, &configs.special].into_iter().find_map(|config| {
        let value = config.get(&key)?;
        value.as_str().or_else(|| value.get("content")?.as_str())
    })
}

/// By text, else by id in the model's own configuration.
fn named_token(configs: &Configs, name: &str, id_of: &dyn Fn(&str) -> Option<u32>) -> Option<u32> {
    let by_text = token_text(configs, name).and_then(id_of);
    let key = format!("{name}_token_id");
    let by_id = || {
        let ids = [&configs.generation, &configs.model].map(|c| c.get(&key).and_then(Value::as_u64));
        ids.into_iter().flatten().find_map(|id| u32::try_from(id).ok())
    };
    by_text.or_else(by_id)
}

/// The tokens that only chat templates see.
fn chat_tokens(configs: &Configs, id_of: &dyn Fn(&str) -> Option<u32>) -> ChatSpec {
    let id = |name: &str| token_text(configs, name).and_then(id_of);
    ChatSpec { begins_with_bos: false, sep: id("sep"), pad: id("pad") }
}

/// Every id that some file calls an end: chat models list the end of a turn in `generation_config.json` only.
fn end_tokens(configs: &Configs, id_of: &dyn Fn(&str) -> Option<u32>) -> Vec<u32> {
    let mut ends: Vec<u32> = token_text(configs, "eos").and_then(id_of).into_iter().collect();
    for ids in [&configs.generation, &configs.model].map(|config| config.get("eos_token_id")).into_iter().flatten() {
        let ids = ids.as_array().map_or(std::slice::from_ref(ids), Vec::as_slice);
        ends.extend(ids.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()));
    }
    ends
}

fn chat_template(dir: &Path, configs: &Configs) -> Result<Option<String>> {
    if let Some((_, source)) = read_text(dir, "chat_template.jinja", MAX_CONFIG)? {
        return Ok(Some(source));
    }
    Ok(match configs.tokenizer.get("chat_template") {
        Some(Value::String(source)) => Some(source.clone()),
        // Several by name, for tools and retrieval; "default" is the plain one.
        Some(Value::Array(named)) => named
            .iter()
            .find(|t| t.get("name").is_some_and(|n| n == "default"))
            .and_then(|t| t.get("template")?.as_str())
            .map(str::to_owned),
        _ => None,
    })
}

/// Null for a file that is not there.
fn read_json(path: &Path) -> Result<Value> {
    let (Some(dir), Some(name)) = (path.parent(), path.file_name().and_then(|n| n.to_str())) else {
        return Ok(Value::Null);
    };
    match read_text(dir, name, MAX_CONFIG)? {
        None => Ok(Value::Null),
        Some((path, text)) => json::parse(text.as_bytes()).map_err(|e| Error::bad(&path, "", format!("not JSON: {e}"))),
    }
}

fn read_text(dir: &Path, name: &str, longest: u64) -> Result<Option<(PathBuf, String)>> {
    let Some((path, file)) = open(dir, name, longest)? else { return Ok(None) };
    match std::str::from_utf8(file.bytes()) {
        Ok(text) => {
            let text = text.to_owned();
            Ok(Some((path, text)))
        }
        Err(e) => Err(Error::bad_at(&path, "", e.valid_up_to() as u64, "not UTF-8 text")),
    }
}

fn open(dir: &Path, name: &str, longest: u64) -> Result<Option<(PathBuf, MappedFile)>> {
    let path = dir.join(name);
    let file = match MappedFile::open(&path) {
        Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    let len = file.bytes().len() as u64;
    if len > longest {
        return Err(Error::bad(&path, "", format!("{len} bytes; at most {longest} are supported")));
    }
    Ok(Some((path, file)))
}
