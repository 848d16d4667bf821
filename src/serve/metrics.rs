//! GET /metrics, in Prometheus' text format. Names are vLLM's where it has the same metric.

use super::daemon::{Daemon, Loaded, ModelState};
use crate::generation::Metrics;
use crate::generation::metrics::{BOUNDS, Histogram, PromptNumbers, VERDICTS};
use std::fmt::Write;
use std::sync::atomic::Ordering;

/// The whole page.
pub fn page(daemon: &Daemon) -> String {
    let mut page = Page(String::new());
    let state = daemon.state();
    page.gauge("model_loaded", "1 if a model is loaded", f64::from(u8::from(matches!(state, ModelState::Ready(_)))));
    page.gauge(
        "draining",
        "1 once the daemon has been told to end",
        f64::from(u8::from(daemon.draining.load(Ordering::Relaxed))),
    );
    page.gauge("uptime_seconds", "seconds since the daemon started", daemon.started.elapsed().as_secs_f64());
    page.counter("connections_total", "connections accepted", daemon.counters.connections.get());
    page.counter("http_requests_total", "requests answered", daemon.counters.requests.get());
    page.counter("http_refused_total", "requests answered with a status of 400 or more", daemon.counters.refused.get());
    page.counter("model_loads_total", "models loaded", daemon.counters.loads.get());
    page.gauge("body_bytes", "bytes of bodies of requests in memory", daemon.limits.held_bytes() as f64);
    page.gauge(
        "num_requests_embedding",
        "requests for embeddings, running or waiting",
        daemon.limits.embedding_now() as f64,
    );
    page.gauge("num_requests_unread", "requests that wait to be parsed and tokenised", daemon.limits.waiting() as f64);
    if let ModelState::Ready(loaded) = &state {
        worker(&mut page, &loaded.handle.metrics);
        let schemas = &loaded.model.schemas;
        page.counter("schemas_tried_total", "schemas tried in a process of their own", schemas.tried.get());
        page.counter("schemas_refused_total", "requests refused for their schema", schemas.refused.get());
        paths(&mut page, loaded);
    }
    process(&mut page);
    page.0
}

fn worker(page: &mut Page, m: &Metrics) {
    page.histogram("time_to_first_token_seconds", "from the request to its first token", &m.time_to_first_token);
    page.histogram("inter_token_latency_seconds", "between tokens of an answer", &m.inter_token_latency);
    page.histogram("e2e_request_latency_seconds", "from the request to its last token", &m.request_latency);
    page.histogram("request_queue_time_seconds", "from the request to its slot", &m.queue_time);
    page.gauge("num_requests_running", "answers under way", m.running.get() as f64);
    page.gauge("num_requests_waiting", "requests that wait for a slot", m.waiting.get() as f64);
    page.gauge("num_requests_max", "answers that can be under way at once", m.slots.get() as f64);
    page.counter("prompt_tokens_total", "tokens of prompts that were run", m.prompt_tokens.get());
    page.counter("cached_tokens_total", "tokens of prompts whose keys were reused", m.cached_tokens.get());
    prompts(page, &m.prompts);
    page.counter("generation_tokens_total", "tokens generated", m.generated_tokens.get());
    page.family("request_success_total", "counter", "answers by how they ended");
    page.sample("request_success_total", "{finished_reason=\"stop\"}", m.finished_stop.get() as f64);
    page.sample("request_success_total", "{finished_reason=\"length\"}", m.finished_length.get() as f64);
    page.counter("request_failed_total", "answers that the engine could not finish", m.failed.get());
    page.family("requests_rejected_total", "counter", "requests that were refused");
    page.sample("requests_rejected_total", "{reason=\"queue_full\"}", m.refused_full.get() as f64);
    page.sample("requests_rejected_total", "{reason=\"schema\"}", m.refused_schema.get() as f64);
    page.counter("client_disconnects_total", "answers whose client disconnected", m.disconnects.get());
    page.counter("decode_passes_total", "passes that made tokens", m.decode_passes.get());
    page.counter("decode_columns_total", "tokens made in them, without guessed ones", m.decode_columns.get());
    page.counter("guessed_tokens_total", "tokens guessed by speculation", m.guessed_tokens.get());
    page.counter("accepted_tokens_total", "guessed tokens that were right", m.accepted_tokens.get());
    page.counter("prompt_passes_total", "passes over parts of prompts, without answers", m.prompt_passes.get());
    page.counter("prompts_along_total", "passes that made tokens and ran a part of a prompt", m.prompts_along.get());
    page.counter("embedding_passes_total", "passes over parts of texts to embed", m.embedding_passes.get());
    page.counter("embedding_tokens_total", "tokens in them", m.embedding_tokens.get());
    page.counter("engine_questions_total", "questions answered between passes, and changes", m.questions.get());
    page.gauge(
        "steps_between_tokens_max",
        "largest number of other work steps between two tokens of an answer",
        m.held_up_most.get() as f64,
    );
    page.family("engine_seconds_total", "counter", "time in the engine by part");
    for (part, ns) in [
        ("attention", &m.attention_ns),
        ("predictor", &m.predictor_ns),
        ("scheduler", &m.scheduler_ns),
        ("ffn", &m.ffn_ns),
        ("head", &m.head_ns),
    ] {
        page.sample("engine_seconds_total", &format!("{{part=\"{part}\"}}"), ns.get() as f64 / 1e9);
    }
    page.counter("ffn_read_bytes_total", "bytes of neuron rows that the CPU read", m.ffn_bytes.get());
    page.counter("neurons_computed_total", "neurons times tokens that were computed", m.neurons_computed.get());
    page.counter("neurons_all_total", "neurons times tokens that a dense model computes", m.neurons_all.get());
    page.counter(
        "ram_hits_total",
        "needed neurons found in host memory, for a model with a memory limit",
        m.ram_hits.get(),
    );
    page.counter("ram_misses_total", "needed neurons that were read from disk", m.ram_misses.get());
    page.counter("disk_read_bytes_total", "bytes of neurons read from disk", m.disk_bytes.get());
    page.counter("disk_reads_total", "reads of neurons from disk", m.disk_reads.get());
    page.counter("disk_reads_again_total", "of them, those that failed or were wrong", m.disk_reads_again.get());
    page.counter(
        "disk_verified_bytes_total",
        "bytes of neurons whose checksums were compared, each once",
        m.disk_verified_bytes.get(),
    );
    page.family("disk_wait_seconds_total", "counter", "time that threads waited for the disk, all together");
    page.sample("disk_wait_seconds_total", "", m.disk_wait_ns.get() as f64 / 1e9);
    page.gauge(
        "ram_budget_bytes",
        "bytes of host memory that the model may take, if it has a memory limit",
        m.ram_budget_bytes.get() as f64,
    );
    page.gauge("ram_used_bytes", "bytes that it takes", m.ram_used_bytes.get() as f64);
    page.counter("hits_total", "active neurons computed on the device", m.hits.get());
    page.counter("misses_total", "active neurons computed on the CPU alongside a device", m.misses.get());
    page.family("block_migrations_total", "counter", "neuron blocks whose move to the device was begun");
    page.sample("block_migrations_total", "{direction=\"in\"}", m.migrations.get() as f64);
    moving(page, m);
    page.gauge("vram_budget_bytes", "bytes that may be used on the device", m.device_budget_bytes.get() as f64);
    page.gauge("vram_used_bytes", "bytes that are", m.device_used_bytes.get() as f64);
    page.counter("audited_tokens_total", "tokens at which the predictor was checked", m.audited_tokens.get());
    page.counter(
        "audited_active_total",
        "truly active neurons of predicted layers at those tokens",
        m.audited_active.get(),
    );
    page.counter("audited_found_total", "of them, those that were computed", m.audited_found.get());
    page.gauge("slots", "places for neuron blocks on the device", m.device_slots.get() as f64);
}

/// The cache of texts that lost their slot.
fn prompts(page: &mut Page, prompts: &PromptNumbers) {
    let gauges = [
        ("prompt_cache_bytes", "bytes of texts and states that lost their slot", &prompts.bytes),
        ("prompt_cache_budget_bytes", "bytes that they may take", &prompts.budget),
        ("prompt_cache_texts", "texts that lost their slot and are kept", &prompts.texts),
        ("prompt_cache_states", "parts of texts whose states are kept", &prompts.states),
        ("prompt_cache_disk_bytes", "bytes of texts on disk", &prompts.disk_bytes),
    ];
    gauges.into_iter().for_each(|(name, help, number)| page.gauge(name, help, number.get() as f64));
    for (name, help, number) in [
        ("prompt_cache_restored_tokens_total", "tokens of prompts restored from them", &prompts.restored_tokens_total),
        ("prompt_cache_saved_total", "texts and states that were saved", &prompts.saved_total),
        ("prompt_cache_evicted_total", "of them, those that were evicted", &prompts.evicted_total),
        ("prompt_cache_files_ignored_total", "files that are no texts, or damaged", &prompts.files_ignored_total),
    ] {
        page.counter(name, help, number.get());
    }
}

/// Whether neurons move, and what comparing that with the static placement has shown.
fn moving(page: &mut Page, m: &Metrics) {
    page.gauge(
        "moving",
        "1 while neurons move to the device, 0 while the static placement is kept",
        m.moving.get() as f64,
    );
    page.family("moving_verdict", "gauge", "1 for the last result of comparing migration with the static placement");
    for (i, verdict) in VERDICTS.into_iter().enumerate() {
        let shown = m.verdict.get() == i as u64;
        page.sample("moving_verdict", &format!("{{verdict=\"{verdict}\"}}"), f64::from(u8::from(shown)));
    }
    page.family("compared_token_seconds", "gauge", "mean time of a token in that comparison");
    for (state, ns) in ["moving", "resting"].into_iter().zip(&m.compared_ns) {
        page.sample("compared_token_seconds", &format!("{{state=\"{state}\"}}"), ns.get() as f64 / 1e9);
    }
}

/// The paths on which neurons are read, with the rates in the machine's profile. Times of the device are by its own clock.
fn paths(page: &mut Page, loaded: &Loaded) {
    let m = &loaded.handle.metrics;
    let paths = [
        ("cpu", &m.ffn_bytes, &m.ffn_ns, loaded.limits.map(|l| l.cpu_gb_s)),
        ("device", &m.device_bytes, &m.device_ns, loaded.limits.map(|l| l.device_gb_s)),
        ("link", &m.link_bytes, &m.link_ns, loaded.limits.map(|l| l.link_gb_s)),
    ];
    let label = |path: &str| format!("{{path=\"{path}\"}}");
    page.family(
        "path_bytes_total",
        "counter",
        "bytes of neurons read by the CPU and by the device, and bytes brought over the link: neurons, and attention that has no room",
    );
    paths.iter().for_each(|(path, bytes, ..)| page.sample("path_bytes_total", &label(path), bytes.get() as f64));
    page.family("path_seconds_total", "counter", "time in which a path was busy");
    paths.iter().for_each(|(path, _, ns, _)| page.sample("path_seconds_total", &label(path), ns.get() as f64 / 1e9));
    page.family("path_limit_bytes_per_second", "gauge", "the rate of a path by the machine's profile");
    for (path, .., limit) in paths {
        if let Some(gb_s) = limit {
            page.sample("path_limit_bytes_per_second", &label(path), gb_s * 1e9);
        }
    }
}

/// Numbers of the process, under the names that Prometheus' client libraries use.
fn process(page: &mut Page) {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let number = |name: &str| -> f64 {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap_or(0.0)
    };
    let bytes = number("VmRSS:") * 1024.0;
    page.plain("process_resident_memory_bytes", "resident memory", bytes);
    page.head("process_cpu_seconds_total", "counter", "processor time of the process and all its threads");
    let _ = writeln!(page.0, "process_cpu_seconds_total {}", crate::clock::process_computed().as_secs_f64());
    page.gauge("cores", "logical processors that the process may use", logical_cores() as f64);
    if let Some(bytes) = crate::config::available_memory() {
        page.gauge("available_memory_bytes", "memory that the process could still allocate", bytes as f64);
    }
    page.plain("process_threads", "threads", number("Threads:"));
    let descriptors = std::fs::read_dir("/proc/self/fd").map_or(0, |entries| entries.count().saturating_sub(1));
    page.plain("process_open_fds", "open file descriptors", descriptors as f64);
}

fn logical_cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

struct Page(String);

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string does not fail.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn family(&mut self, name: &str, kind: &str, help: &str) {
        self.head(&format!("dynamicinfer_{name}"), kind, help);
    }

    fn sample(&mut self, name: &str, labels: &str, value: f64) {
        let _ = writeln!(self.0, "dynamicinfer_{name}{labels} {value}");
    }

    fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.family(name, "gauge", help);
        self.sample(name, "", value);
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.family(name, "counter", help);
        self.sample(name, "", value as f64);
    }

    fn plain(&mut self, name: &str, help: &str, value: f64) {
        self.head(name, "gauge", help);
        let _ = writeln!(self.0, "{name} {value}");
    }

    fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram) {
        self.family(name, "histogram", help);
        let counts = histogram.cumulative();
        for (bound, count) in BOUNDS.iter().zip(counts) {
            self.sample(name, &format!("_bucket{{le=\"{bound}\"}}"), count as f64);
        }
        let all = counts[BOUNDS.len()] as f64;
        self.sample(name, "_bucket{le=\"+Inf\"}", all);
        self.sample(name, "_sum", histogram.seconds());
        self.sample(name, "_count", all);
    }
}
