//! Files that this program keeps for itself and can make again: one that is damaged costs a warning, not the run. A damaged
//! `activation.history` ended `run` and `serve`, and had to be found and deleted.

use crate::support::packed;
use dynamicinfer::formats::history_file;
use dynamicinfer::formats::rows::Quant;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Runs a verb in a home of its own; what it wrote, and what it said.
fn run(home: &Path, args: &[&str]) -> (String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dynamicinfer"));
    command.args(args).current_dir(home).env_clear().env("HOME", home).env("XDG_RUNTIME_DIR", home);
    let output = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{args:?}: {} {out} {err}", output.status);
    (out, err)
}

fn machine() -> String {
    format!("{}/profiles/machines/demo-pc.toml", env!("CARGO_MANIFEST_DIR"))
}

/// The files of this name below a directory.
fn below(dir: &Path, name: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    entries
        .flat_map(|path| if path.is_dir() { below(&path, name) } else { vec![path] })
        .filter(|path| path.file_name().is_some_and(|found| found == name))
        .collect()
}

#[test]
fn a_history_that_cannot_be_read_is_set_aside_and_written_anew() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let store = packed(home, "llama-relu2", Quant::F32);
    let (store, machine) = (store.to_str().unwrap(), machine());
    let args = [
        "run",
        store,
        "Once upon a time",
        "--temp",
        "0",
        "-n",
        "8",
        "--ignore-eos",
        "--predictor",
        "exact",
        "--device",
        "virtual",
        "--ffn-share",
        "0.5",
        "--machine",
        &machine,
    ];
    let (text, said) = run(home, &args);
    assert!(!said.contains("set aside"), "{said}");
    let kept = below(home, "activation.history");
    let [kept] = &kept[..] else { panic!("{kept:?}") };
    let good = std::fs::read(kept).unwrap();
    let aside = kept.with_file_name("activation.history.damaged");
    type Damage = fn(&Path, &[u8]);
    let damages: [(&str, Damage); 6] = [
        ("a bit of the numbers", |path, good| {
            std::fs::write(path, good).unwrap();
            let at = history_file::open(path).unwrap().section("frequency.0").unwrap().offset as usize;
            let mut bytes = good.to_vec();
            bytes[at] ^= 0x40;
            std::fs::write(path, bytes).unwrap();
        }),
        ("cut", |path, good| std::fs::write(path, &good[..good.len() / 2]).unwrap()),
        ("empty", |path, _| std::fs::write(path, "").unwrap()),
        ("another version", |path, good| {
            let mut bytes = good.to_vec();
            bytes[8] = 77;
            std::fs::write(path, bytes).unwrap();
        }),
        ("a pipe", |path, _| mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap()),
        ("a link to itself", |path, _| symlink(path, path).unwrap()),
    ];
    for (case, damage) in damages {
        std::fs::remove_file(kept).unwrap();
        damage(kept, &good);
        // A link that leads nowhere is no file to any program.
        let is_there = kept.exists();
        let (again, said) = run(home, &args);
        assert!(!again.is_empty() && !text.is_empty(), "{case}: {said}");
        let warned =
            said.contains("warning: ") && said.contains("activation.history") && said.contains("it was set aside as");
        assert_eq!(warned, is_there, "{case}: {said}");
        assert_eq!(aside.symlink_metadata().is_ok(), is_there, "{case}");
        let _ = std::fs::remove_file(&aside);
        if is_there {
            assert!(kept.is_file(), "{case}: none was written anew");
            let (_, said) = run(home, &args);
            assert!(!said.contains("set aside"), "{case}: {said}");
        }
        let _ = std::fs::remove_file(kept);
        std::fs::write(kept, &good).unwrap();
    }
}

#[test]
fn a_damaged_copy_in_the_cache_is_packed_again() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/llama");
    let args = ["run", model.to_str().unwrap(), "Once upon", "--temp", "0", "-n", "4", "--ignore-eos"];
    let (text, _) = run(home, &args);
    let copies: Vec<PathBuf> =
        std::fs::read_dir(home.join(".cache/dynamicinfer/models")).unwrap().flatten().map(|e| e.path()).collect();
    let [copy] = &copies[..] else { panic!("{copies:?}") };
    // A norm, which is looked at when the copy is opened.
    let store = dynamicinfer::formats::neuron_store::NeuronStore::open(copy).unwrap();
    let at = store.section("layer.1.ffn_norm").unwrap().offset as usize;
    let mut bytes = std::fs::read(copy).unwrap();
    bytes[at] ^= 1;
    std::fs::write(copy, bytes).unwrap();
    let (again, said) = run(home, &args);
    assert!(
        again == text && said.contains("layer.1.ffn_norm: checksum") && said.contains("packing it again"),
        "{said}"
    );
    let (again, said) = run(home, &args);
    assert!(again == text && !said.contains("packing"), "{said}");
}

#[test]
fn a_machine_profile_that_nobody_has_named_is_passed_over_with_a_warning() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let machines = home.join(".local/share/dynamicinfer/machines");
    std::fs::create_dir_all(&machines).unwrap();
    std::fs::write(machines.join("default.toml"), "dram_gb_s = \"much\"").unwrap();
    let store = packed(home, "llama-relu2", Quant::F32);
    let (_, said) = run(home, &["plan", store.to_str().unwrap(), "--vram", "64M"]);
    assert!(
        said.contains("warning: ") && said.contains("default.toml") && said.contains("measuring this one"),
        "{said}"
    );
}
