//! The form that all of this program's own binary files share: a preamble of 64 bytes, named sections at multiples of
//! 4096, a JSON header at the end, checksums of everything. `docs/neuron_store.md` draws the bytes.
//!
//! What the header says besides the sections is the business of each kind of file: [`super::neuron_store`],
//! [`super::predictor_file`], [`super::profile_file`].

use super::MappedFile;
use super::block_checksums::{BlockChecksums, name_of};
use super::faults::step;
use super::rows::{Quant, ROW_ALIGN};
use crate::error::{Error, Result, excerpt};
use serde::de::{DeserializeOwned, DeserializeSeed, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

/// Sections begin at multiples of this: a page, and what O_DIRECT reads need.
pub const SECTION_ALIGN: u64 = 4096;
const PREAMBLE: usize = 64;
/// A header holds some hundred bytes per section, and a model has tens of sections per layer at most.
const MAX_HEADER: u64 = 64 << 20;
/// Most JSON values in a field whose form this module does not know: a model's shape has 2048 RoPE frequencies at most.
const MAX_VALUES: usize = 4096;

/// The JSON header of one kind of file, with what tells this kind from others.
pub trait Header: Serialize + DeserializeOwned {
    /// The first eight bytes of a file of this kind.
    const MAGIC: [u8; 8];
    /// The version of the kind that is written, and the only one that is read.
    const VERSION: u32;
    /// What messages call a file of this kind: "neuron store".
    const NOUN: &'static str;
    /// What messages advise to do about a bad file: "pack the model again".
    const REMEDY: &'static str;

    /// The sections that the header lists.
    fn sections(&self) -> &[Section];
    /// Replaces the list of sections; [`Writer::finish`] calls it, which alone knows where they lie.
    fn set_sections(&mut self, sections: Vec<Section>);
}

/// A named run of bytes in a file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Section {
    /// Its name, which no other section of the file has.
    pub name: String,
    /// What the bytes are.
    pub content: Content,
    /// Bytes from the start of the file; a multiple of [`SECTION_ALIGN`], unless the content is [`Content::Bytes`].
    pub offset: u64,
    /// Its length in bytes.
    pub bytes: u64,
    /// xxh3-64 of the bytes, in hex: JSON numbers hold 53 bits in many readers.
    pub checksum: String,
}

/// What kind of data a section holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Content {
    /// Rows of weights, `rows` times `Quant::row_bytes(cols)` bytes.
    Rows {
        /// How the numbers are stored.
        quant: Quant,
        /// How many rows there are.
        rows: usize,
        /// Numbers of a row; a multiple of [`Quant::unit`].
        cols: usize,
    },
    /// Neuron blocks whose rows have types of their own: `neurons` times the rows of gate, up and down, `Quant::row_bytes(cols)` each.
    Neurons {
        /// The type of gate rows; `None` where neurons have no gate.
        gate: Option<Quant>,
        /// The type of up rows.
        up: Quant,
        /// The type of down rows.
        down: Quant,
        /// How many neurons there are.
        neurons: usize,
        /// Numbers of a row; a multiple of each type's [`Quant::unit`].
        cols: usize,
    },
    /// Clusters of neighbouring neurons, one after the other: of each gate, up (`neurons` rows of `cols` numbers) and down (`cols` rows of
    /// `neurons` numbers), every row as a GGUF has it, without padding; after each cluster zeros up to a multiple of 64 bytes.
    Clusters {
        /// The type of gate.
        gate: Quant,
        /// The type of up.
        up: Quant,
        /// The type of down.
        down: Quant,
        /// How many clusters there are.
        clusters: usize,
        /// Neurons of each; a multiple of down's [`Quant::unit`].
        neurons: usize,
        /// Numbers of a row of gate and up, a multiple of their [`Quant::unit`].
        cols: usize,
    },
    /// Experts of a mixture, one after the other: of each gate, up and down, `neurons` rows of `cols` numbers, `Quant::row_bytes(cols)`
    /// each. A row of down is what a neuron adds.
    Experts {
        /// The type of gate; `None` where experts have no gate.
        gate: Option<Quant>,
        /// The type of up.
        up: Quant,
        /// The type of down.
        down: Quant,
        /// How many experts there are.
        experts: usize,
        /// Neurons of each.
        neurons: usize,
        /// Numbers of a row; a multiple of each type's [`Quant::unit`].
        cols: usize,
    },
    /// Little-endian u32 numbers.
    Numbers,
    /// Bytes of something with a format of its own (the tokeniser's JSON).
    Bytes,
}

impl Content {
    fn expected_bytes(self) -> Option<u64> {
        match self {
            Content::Rows { quant, rows, cols } => {
                let fits = cols < 1 << 32 && cols.is_multiple_of(quant.unit());
                fits.then(|| (quant.row_bytes(cols) as u64).checked_mul(rows as u64)).flatten()
            }
            Content::Neurons { gate, up, down, neurons, cols } => {
                let mut quants = gate.into_iter().chain([up, down]);
                let fits = cols < 1 << 32 && quants.clone().all(|quant| cols.is_multiple_of(quant.unit()));
                let block = || quants.try_fold(0u64, |sum, quant| sum.checked_add(quant.row_bytes(cols) as u64));
                fits.then(block).flatten()?.checked_mul(neurons as u64)
            }
            Content::Clusters { clusters: count, .. } | Content::Experts { experts: count, .. } => {
                self.cluster_bytes()?.checked_mul(count as u64)
            }
            Content::Numbers | Content::Bytes => None,
        }
    }

    /// Bytes of gate, up and down of one cluster or expert, or of up and down; `None` where there are none, or of sizes that cannot be.
    pub fn cluster_parts(self) -> Option<Vec<u64>> {
        let fits = |quant: Quant, cols: usize| cols < 1 << 32 && cols.is_multiple_of(quant.unit());
        let matrix = |quant: Quant, rows: usize, cols: usize| {
            let row = match self {
                Content::Experts { .. } => fits(quant, cols).then(|| quant.row_bytes(cols)),
                _ => (fits(quant, cols) && !quant.is_grouped()).then(|| quant.number_bytes(cols)),
            };
            (row? as u64).checked_mul(rows as u64)
        };
        match self {
            Content::Experts { gate, up, down, neurons, cols, .. } => {
                gate.into_iter().chain([up, down]).map(|quant| matrix(quant, neurons, cols)).collect()
            }
            Content::Clusters { gate, up, down, neurons, cols, .. } => {
                Some(vec![matrix(gate, neurons, cols)?, matrix(up, neurons, cols)?, matrix(down, cols, neurons)?])
            }
            _ => None,
        }
    }

    /// Bytes from one cluster or expert to the next; `None` where there are none, or of sizes that cannot be.
    pub fn cluster_bytes(self) -> Option<u64> {
        let sum = self.cluster_parts()?.into_iter().try_fold(0u64, u64::checked_add)?;
        sum.checked_next_multiple_of(ROW_ALIGN as u64)
    }
}

/// An open file.
#[derive(Debug)]
pub struct SectionFile<H> {
    file: MappedFile,
    /// The header, as it stands at the end of the file.
    pub header: H,
    by_name: HashMap<String, usize>,
}

impl<H: Header> SectionFile<H> {
    /// Whether the file begins as one of this kind does.
    pub fn is_one(path: &Path) -> bool {
        let mut magic = [0; 8];
        matches!(MappedFile::open(path), Ok(file) if {
            let n = file.bytes().len().min(8);
            magic[..n].copy_from_slice(&file.bytes()[..n]);
            magic == H::MAGIC
        })
    }

    /// Maps a file and reads its header. The sections' checksums are not compared: [`SectionFile::verify`] does that.
    ///
    /// # Errors
    /// [`Error::Io`] if it cannot be opened, [`Error::BadFile`] if it is not one of this kind, was cut or is damaged.
    pub fn open(path: &Path) -> Result<SectionFile<H>> {
        SectionFile::read(MappedFile::open(path)?)
    }

    fn read(file: MappedFile) -> Result<SectionFile<H>> {
        let header: H = parse(file.bytes(), &file.path)?;
        let mut by_name = HashMap::with_capacity(header.sections().len());
        for (i, section) in header.sections().iter().enumerate() {
            if by_name.insert(section.name.clone(), i).is_some() {
                return Err(Error::bad(
                    &file.path,
                    &section.name,
                    format!("the section is there twice; {}", H::REMEDY),
                ));
            }
        }
        Ok(SectionFile { file, header, by_name })
    }

    /// The path that the file was opened by.
    pub fn path(&self) -> &Path {
        &self.file.path
    }

    /// The mapped file itself.
    pub fn file(&self) -> &MappedFile {
        &self.file
    }

    /// Bytes of the whole file.
    pub fn file_bytes(&self) -> u64 {
        self.file.bytes().len() as u64
    }

    /// The section of this name, if there is one.
    pub fn section(&self, name: &str) -> Option<&Section> {
        self.by_name.get(name).map(|&i| &self.header.sections()[i])
    }

    /// The bytes of a section of this file.
    pub fn bytes(&self, section: &Section) -> &[u8] {
        &self.file.bytes()[section.offset as usize..(section.offset + section.bytes) as usize]
    }

    /// Reads every section and compares its checksum; `step(bytes)` is called after each with its length.
    ///
    /// # Errors
    /// [`Error::BadFile`] with the first section that is damaged.
    pub fn verify(&self, mut step: impl FnMut(u64)) -> Result<()> {
        self.header.sections().iter().try_for_each(|section| {
            self.compare(section)?;
            step(section.bytes);
            Ok(())
        })
    }

    /// Reads a section of this file and compares its checksum.
    ///
    /// # Errors
    /// [`Error::BadFile`] if it is damaged.
    pub fn compare(&self, section: &Section) -> Result<()> {
        let found = checksum(self.bytes(section));
        if found == section.checksum {
            return Ok(());
        }
        let why = format!("checksum {found}, not {}: the file is damaged; {}", section.checksum, H::REMEDY);
        Err(Error::bad_at(self.path(), &section.name, section.offset, why))
    }

    /// Brings the whole file into memory, so that the first token does not fault it in page by page.
    pub fn load(&self) {
        self.file.load();
    }
}

fn checksum(bytes: &[u8]) -> String {
    format!("{:016x}", xxh3_64(bytes))
}

/// Checks a file's bytes and reads its header.
pub fn parse<H: Header>(bytes: &[u8], path: &Path) -> Result<H> {
    let remedy = H::REMEDY;
    let bad = |offset: usize, field: &str, why: String| Error::bad_at(path, field, offset as u64, why);
    if bytes.len() < PREAMBLE || bytes[..8] != H::MAGIC {
        let magic = H::MAGIC.escape_ascii().to_string();
        let why = format!("not a {} (it does not begin with {}); {remedy}", H::NOUN, magic.trim_end_matches("\\x00"));
        return Err(Error::bad(path, "", why));
    }
    let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    let version = u32::from_le_bytes(bytes[8..12].try_into().expect("four bytes"));
    if version != H::VERSION {
        let why = format!("is {version}, this program reads {}; {remedy}", H::VERSION);
        return Err(bad(8, "version", why));
    }
    let (header_at, header_bytes, header_sum, file_bytes) = (u64_at(16), u64_at(24), u64_at(32), u64_at(40));
    if file_bytes != bytes.len() as u64 {
        let why = format!("says {file_bytes}, the file has {}: it was cut or not finished; {remedy}", bytes.len());
        return Err(bad(40, "file length", why));
    }
    if header_bytes > MAX_HEADER || header_at.checked_add(header_bytes) != Some(file_bytes) {
        return Err(bad(
            16,
            "header",
            format!("{header_bytes} bytes at {header_at} do not end the file: it is damaged; {remedy}"),
        ));
    }
    let text = &bytes[header_at as usize..];
    if xxh3_64(text) != header_sum {
        return Err(bad(header_at as usize, "header", format!("checksum differs: the file is damaged; {remedy}")));
    }
    let header: H = serde_json::from_slice(text)
        .map_err(|e| bad(header_at as usize, "header", format!("not understood: {}; {remedy}", excerpt(e))))?;
    for section in header.sections() {
        let end = section.offset.checked_add(section.bytes);
        if section.offset < PREAMBLE as u64 || end.is_none_or(|end| end > header_at) {
            let why = format!("{} bytes at {} are not inside the file's data; {remedy}", section.bytes, section.offset);
            return Err(Error::bad(path, &section.name, why));
        }
        let wanted = match section.content {
            Content::Numbers => Some(section.bytes / 4 * 4),
            Content::Bytes => Some(section.bytes),
            weights => weights.expected_bytes(),
        };
        let align = if section.content == Content::Bytes { 1 } else { SECTION_ALIGN };
        if wanted != Some(section.bytes) || !section.offset.is_multiple_of(align) {
            let why =
                format!("{} bytes at {} do not fit {:?}; {remedy}", section.bytes, section.offset, section.content);
            return Err(Error::bad(path, &section.name, why));
        }
    }
    check_apart::<H>(header.sections(), path)?;
    Ok(header)
}

/// Checks that no two sections share a byte. Else a small file could list the same bytes again and again, and readers would allocate
/// far more memory than the file is long.
fn check_apart<H: Header>(sections: &[Section], path: &Path) -> Result<()> {
    let mut in_order: Vec<&Section> = sections.iter().collect();
    in_order.sort_unstable_by_key(|s| (s.offset, s.bytes));
    for pair in in_order.windows(2) {
        let (first, second) = (pair[0], pair[1]);
        if second.offset < first.offset + first.bytes {
            let why =
                format!("begins before {} ends: sections may not share bytes; {}", excerpt(&first.name), H::REMEDY);
            return Err(Error::bad_at(path, &second.name, second.offset, why));
        }
    }
    Ok(())
}

/// Checks fields, given as (name, value, greatest value allowed): each value must be at least 1. The error is the first wrong field's
/// name and what is wrong with it.
pub fn check_bounds(fields: &[(&'static str, usize, usize)]) -> Result<(), (&'static str, String)> {
    match fields.iter().find(|(_, value, top)| *value == 0 || value > top) {
        Some((field, value, top)) => Err((field, format!("is {value}; it must be 1 to {top}"))),
        None => Ok(()),
    }
}

/// Checks a model's shape as [`check_bounds`] does, with the bounds of `model::Description::check`: products stay far inside 64
/// bits.
pub fn check_shape(layers: usize, hidden: usize, ffn: usize) -> Result<(), (String, String)> {
    check_bounds(&[("layers", layers, 1 << 12), ("hidden", hidden, 1 << 17), ("ffn", ffn, 1 << 20)])
        .map_err(|(field, why)| (field.to_owned(), why))
}

/// For `deserialize_with`: reads JSON of any form with at most 4096 values. A value takes as little as two bytes in a file and up to
/// some hundred in memory.
pub fn few_values<'de, D: Deserializer<'de>>(from: D) -> Result<Value, D::Error> {
    Few(&mut 0).deserialize(from)
}

/// Reads a JSON value; the number counts the values that were read so far.
struct Few<'a>(&'a mut usize);

impl<'de> DeserializeSeed<'de> for Few<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Value, D::Error> {
        *self.0 += 1;
        if *self.0 > MAX_VALUES {
            return Err(serde::de::Error::custom(format!("more than {MAX_VALUES} values in one field")));
        }
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Few<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = from.next_element_seed(Few(&mut *self.0))? {
            values.push(value);
        }
        Ok(values.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = from.next_key::<String>()? {
            map.insert(key, from.next_value_seed(Few(&mut *self.0))?);
        }
        Ok(map.into())
    }
}

/// Writes a file beside its final name and renames it when it is complete, so that a reader never sees half of one.
/// Dropped before [`Writer::finish`], it removes what it wrote.
pub struct Writer {
    file: File,
    temporary: PathBuf,
    path: PathBuf,
    sections: Vec<Section>,
    tables: Vec<BlockChecksums>,
    end: u64,
    finished: bool,
}

impl Writer {
    /// Creates the temporary file for `path`.
    ///
    /// # Errors
    /// [`Error::Io`] if the system refuses.
    pub fn create(path: &Path) -> Result<Writer> {
        let (file, temporary) = super::temporary::create(path)?;
        let end = PREAMBLE as u64;
        let path = path.to_owned();
        Ok(Writer { file, temporary, path, sections: Vec::new(), tables: Vec::new(), end, finished: false })
    }

    /// As [`Writer::create`], of a file that only this user can read and change.
    ///
    /// # Errors
    /// [`Error::Io`] if the system refuses.
    pub fn create_private(path: &Path) -> Result<Writer> {
        use std::os::unix::fs::PermissionsExt;
        let writer = Writer::create(path)?;
        let set = writer.file.set_permissions(std::fs::Permissions::from_mode(0o600));
        set.map_err(Error::io("protect", &writer.temporary))?;
        Ok(writer)
    }

    /// Reserves a section; its bytes are written with [`Writer::write`], in any order and from several threads.
    pub fn add(&mut self, name: &str, content: Content, bytes: u64) -> usize {
        let offset = self.end.next_multiple_of(SECTION_ALIGN);
        self.end = offset + bytes;
        self.sections.push(Section { name: name.into(), content, offset, bytes, checksum: String::new() });
        self.sections.len() - 1
    }

    /// Reserves a section of `rows` rows of `cols` numbers, as [`Writer::add`], and returns its number.
    pub fn add_rows(&mut self, name: &str, quant: Quant, rows: usize, cols: usize) -> usize {
        self.add(name, Content::Rows { quant, rows, cols }, (rows * quant.row_bytes(cols)) as u64)
    }

    /// Reserves a section of neuron blocks with rows of these types (gate, up, down, or up and down) of `cols` numbers. Where all have one
    /// type, they are its rows, which is what stores of older versions have.
    pub fn add_neurons(&mut self, name: &str, quants: &[Quant], neurons: usize, cols: usize) -> usize {
        let (up, down) = (quants[quants.len() - 2], quants[quants.len() - 1]);
        if quants.iter().all(|quant| *quant == down) {
            return self.add_rows(name, down, neurons * quants.len(), cols);
        }
        let gate = (quants.len() == 3).then(|| quants[0]);
        let block: usize = quants.iter().map(|quant| quant.row_bytes(cols)).sum();
        self.add(name, Content::Neurons { gate, up, down, neurons, cols }, (neurons * block) as u64)
    }

    /// Reserves the section of the checksums of the blocks of section `of`, which lie one behind the other at multiples of [`ROW_ALIGN`] and
    /// have parts of so many bytes: a number for each part. [`Writer::finish`] computes them.
    pub fn add_checksums(&mut self, of: usize, parts: &[u64]) {
        let stride = parts.iter().sum::<u64>().next_multiple_of(ROW_ALIGN as u64);
        let count = self.sections[of].bytes / stride.max(1) * parts.len() as u64;
        let name = name_of(&self.sections[of].name);
        let section = self.add(&name, Content::Numbers, count * size_of::<u32>() as u64);
        self.tables.push(BlockChecksums { section, of, stride: stride as usize, parts: parts.to_vec() });
    }

    /// Cuts a section to its first `bytes`; the space after them stays unused in the file, unless [`Writer::close_gaps`] is called.
    pub fn shorten(&mut self, section: usize, bytes: u64) {
        let section = &mut self.sections[section];
        assert!(bytes <= section.bytes, "{} cannot grow", section.name);
        section.bytes = bytes;
    }

    /// Moves every section to where the one before it ends, so that the file is no larger than what is in it.
    ///
    /// # Errors
    /// [`Error::Io`] if the system refuses.
    pub fn close_gaps(&mut self) -> Result<()> {
        let mut buffer = vec![0; 1 << 20];
        let mut end = PREAMBLE as u64;
        for section in &mut self.sections {
            let (from, to) = (section.offset, end.next_multiple_of(SECTION_ALIGN));
            let mut moved = 0;
            while to < from && moved < section.bytes {
                let n = buffer.len().min((section.bytes - moved) as usize);
                let copy = self.file.read_exact_at(&mut buffer[..n], from + moved);
                let copy = copy.and_then(|()| self.file.write_all_at(&buffer[..n], to + moved));
                copy.map_err(Error::io("write", &self.temporary))?;
                moved += n as u64;
            }
            section.offset = to;
            end = to + section.bytes;
        }
        self.end = end;
        Ok(())
    }

    /// Writes `bytes` at `at` within section `section`.
    pub fn write(&self, section: usize, at: u64, bytes: &[u8]) -> Result<()> {
        let section = &self.sections[section];
        assert!(at + bytes.len() as u64 <= section.bytes, "{} is written past its end", section.name);
        let write = step().and_then(|()| self.file.write_all_at(bytes, section.offset + at));
        write.map_err(Error::io("write", &self.temporary))
    }

    /// Computes the checksums, writes the header with its list of sections, syncs the file and renames it to its final name.
    ///
    /// # Errors
    /// [`Error::Io`] if the system refuses any of this; the file is then removed.
    pub fn finish<H: Header>(mut self, mut header: H) -> Result<()> {
        use rayon::prelude::*;
        let io = |e| Error::io("write", &self.temporary)(e);
        let header_at = self.end;
        step().and_then(|()| self.file.set_len(header_at)).map_err(io)?;
        let written = MappedFile::open(&self.temporary)?;
        let mut sections = std::mem::take(&mut self.sections);
        let make = |(number, s): (usize, &mut Section)| {
            let bytes = &written.bytes()[s.offset as usize..(s.offset + s.bytes) as usize];
            s.checksum = checksum(bytes);
            // Made here, where the section has just been read.
            let table = self.tables.iter().find(|table| table.of == number)?;
            Some((table.section, table.make(bytes)))
        };
        let tables: Vec<(usize, Vec<u8>)> = sections.par_iter_mut().enumerate().filter_map(make).collect();
        for (section, table) in tables {
            let section = &mut sections[section];
            section.checksum = checksum(&table);
            step().and_then(|()| self.file.write_all_at(&table, section.offset)).map_err(io)?;
        }
        drop(written);
        header.set_sections(sections);
        let text = serde_json::to_vec(&header).expect("a header is plain data");
        step().and_then(|()| self.file.write_all_at(&text, header_at)).map_err(io)?;
        let mut preamble = [0u8; PREAMBLE];
        preamble[..8].copy_from_slice(&H::MAGIC);
        preamble[8..12].copy_from_slice(&H::VERSION.to_le_bytes());
        preamble[16..24].copy_from_slice(&header_at.to_le_bytes());
        preamble[24..32].copy_from_slice(&(text.len() as u64).to_le_bytes());
        preamble[32..40].copy_from_slice(&xxh3_64(&text).to_le_bytes());
        preamble[40..48].copy_from_slice(&(header_at + text.len() as u64).to_le_bytes());
        step().and_then(|()| self.file.write_all_at(&preamble, 0)).map_err(io)?;
        step().and_then(|()| self.file.sync_all()).map_err(io)?;
        // What was written lies in the page cache in small pages. Dropped from there, it is read back in huge pages.
        let _ = rustix::fs::fadvise(&self.file, 0, None, rustix::fs::Advice::DontNeed);
        let rename = step().and_then(|()| super::temporary::rename(&self.temporary, &self.path));
        rename.map_err(Error::io("rename to", &self.path))?;
        self.finished = true;
        Ok(())
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if !self.finished {
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}
