//! Compiles the shim and every kernel of `kernels/` and of `tests/*.cu`, each source as it stands, for the CPU.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

/// Stands in for `__global__` while the names of kernels are looked for.
const MARK: &str = "CUDA_ON_CPU_KERNEL";

fn main() {
    let here = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let kernels = here.join("../../kernels");
    println!("cargo::rerun-if-changed={}", kernels.display());
    println!("cargo::rerun-if-changed=shim");
    println!("cargo::rerun-if-changed=tests/broken.cu");
    println!("cargo::rerun-if-changed=tests/broken_norm.cu");
    println!("cargo::rerun-if-changed=tests/mma.cu");

    let mut sources: Vec<PathBuf> =
        [&kernels, &here.join("tests")].into_iter().flat_map(|dir| sources_of(dir)).collect();
    sources.sort();

    let mut build = compiler(&here, &kernels);
    build.file(here.join("shim/fibers.cpp"));
    let mut tables = Vec::new();
    for source in &sources {
        let stem = source.file_stem().and_then(|s| s.to_str()).expect("a source has a plain name");
        let names = kernel_names(&here, &kernels, source);
        let mut text = format!("#include \"cuda_on_cpu.h\"\n#include \"{}\"\n", source.display());
        let _ = writeln!(text, "extern \"C\" const cuda_on_cpu::Kernel cuda_on_cpu_of_{stem}[];");
        let _ = writeln!(text, "const cuda_on_cpu::Kernel cuda_on_cpu_of_{stem}[] = {{");
        for name in &names {
            let _ = writeln!(text, "    cuda_on_cpu::Call<&{name}>::kernel(\"{name}\"),");
        }
        text.push_str("};\n");
        let wrapped = out.join(format!("{stem}.cpp"));
        write_if_new(&wrapped, &text);
        build.file(wrapped);
        tables.push((stem.to_owned(), names.len()));
    }
    let table = out.join("table.cpp");
    write_if_new(&table, &table_text(&tables));
    build.file(table);
    build.compile("cuda_on_cpu");
}

/// CUDA sources of a folder.
fn sources_of(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let files = fs::read_dir(folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    files
        .map(|entry| entry.expect("a readable folder").path())
        .filter(|path| path.extension().is_some_and(|e| e == "cu"))
}

fn compiler(here: &Path, kernels: &Path) -> cc::Build {
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        // Unoptimised, the tests take minutes.
        .opt_level(2)
        .include(here.join("shim"))
        .include(kernels)
        // What kernels round once is written as one fmaf, here and for NVRTC: results can be compared bit by bit.
        .flag("-ffp-contract=off")
        // Vectors alias what they are loaded from, as in CUDA.
        .flag("-fno-strict-aliasing")
        .flag("-fvisibility=hidden")
        .flag("-pthread")
        // Nothing that is made anew in each thread needs more than zeros.
        .flag("-fno-extern-tls-init")
        // #pragma unroll is nvcc's.
        .flag("-Wno-unknown-pragmas")
        .warnings(true);
    if env::var("CARGO_CFG_TARGET_ARCH").is_ok_and(|arch| arch == "x86_64") {
        // fmaf and conversions of halves as instructions.
        build.flag("-march=x86-64-v3");
    }
    build
}

/// Names of the kernels of a source, as the preprocessor leaves them: macros may make them.
fn kernel_names(here: &Path, kernels: &Path, source: &Path) -> Vec<String> {
    let mut build = compiler(here, kernels);
    build.define("__global__", MARK).flag("-include").flag(here.join("shim/cuda_on_cpu.h").to_str().expect("UTF-8"));
    let expanded = String::from_utf8(build.flag("-xc++").file(source).expand()).expect("sources are UTF-8");
    let names: Vec<String> = expanded
        .split(MARK)
        .skip(1)
        .map(|rest| {
            let head = rest.split('(').next().unwrap_or_default();
            head.split_whitespace().last().unwrap_or_default().to_owned()
        })
        .collect();
    assert!(!names.is_empty(), "{} has no kernel", source.display());
    names
}

fn table_text(tables: &[(String, usize)]) -> String {
    let mut text = String::from("#include \"cuda_on_cpu.h\"\nusing cuda_on_cpu::Kernel;\nextern \"C\" {\n");
    for (stem, _) in tables {
        let _ = writeln!(text, "extern const Kernel cuda_on_cpu_of_{stem}[];");
    }
    text.push_str("extern const Kernel *const cuda_on_cpu_table[];\nextern const size_t cuda_on_cpu_counts[];\n");
    text.push_str("extern const size_t cuda_on_cpu_sources;\nconst Kernel *const cuda_on_cpu_table[] = {");
    tables.iter().for_each(|(stem, _)| _ = write!(text, "cuda_on_cpu_of_{stem}, "));
    text.push_str("};\nconst size_t cuda_on_cpu_counts[] = {");
    tables.iter().for_each(|(_, count)| _ = write!(text, "{count}, "));
    let _ = writeln!(text, "}};\nconst size_t cuda_on_cpu_sources = {};\n}}", tables.len());
    text
}

/// A file that has not changed keeps its time.
fn write_if_new(path: &Path, text: &str) {
    if fs::read_to_string(path).is_ok_and(|old| old == text) {
        return;
    }
    fs::write(path, text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
}
