//! Jinja2 as transformers' `apply_chat_template` sets it up, on minijinja: trim_blocks and lstrip_blocks, loop controls, the sandbox that
//! changes no value, `tojson`, `raise_exception` and `strftime_now`.
//!
//! minijinja resembles Jinja2, and differs in hundreds of small things. Filters, tests, functions and methods are replaced here; what is
//! syntax is rewritten in the source before it is compiled ([`source`]). `tests/text/jinja2.rs` compares more than a thousand constructs with
//! what Jinja2 itself gives, and lists those that still differ.

mod args;
mod expression;
mod filters;
mod format;
mod json;
mod methods;
mod objects;
mod operators;
mod source;
mod text_filters;
mod time;
mod tokens;
mod values;

pub use source::rewritten;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{AutoEscape, Environment, Error, State, Value};
use std::cmp::Ordering;
use std::sync::{Arc, Mutex};
use values::{text, wrong};

/// An environment in which [`rewritten`] templates give what Jinja2 gives. `now` is the time of `strftime_now`, in seconds since 1970;
/// what a template says with `raise_exception` is put into `raised`.
pub fn environment(now: i64, raised: Arc<Mutex<Option<String>>>) -> Environment<'static> {
    let mut env = Environment::new();
    // Fails only for delimiters, which stay as they are.
    if let Ok(syntax) = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build() {
        env.set_syntax(syntax);
    }
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_unknown_method_callback(methods::call);
    env.set_formatter(|out, state, value| {
        let shown = text(value);
        let escapes = matches!(state.auto_escape(), AutoEscape::Html) && !value.is_safe();
        out.write_str(if escapes { values::escaped(&shown) } else { shown }.as_str()).map_err(Error::from)
    });
    add_filters(&mut env, now);
    add_tests(&mut env);
    env.add_function("range", values::Range::of);
    env.add_global("dict", Value::from_object(objects::DictType));
    env.add_function("cycler", objects::Cycler::of);
    env.add_function("joiner", |sep: Option<Value>| objects::Joiner::of(sep));
    let original = env.globals().find(|(name, _)| *name == "namespace").map(|(_, original)| original);
    if let Some(original) = original {
        env.add_function("namespace", move |state: &mut State, args: Rest<Value>, named: Kwargs| {
            namespace(&original, state, &args::joined(args, named))
        });
    }
    env.add_function("raise_exception", move |reason: Value| -> Result<Value, Error> {
        let reason = text(&reason);
        *raised.lock().unwrap_or_else(|e| e.into_inner()) = Some(reason.clone());
        Err(wrong(reason))
    });
    env.add_function("strftime_now", move |format: String| time::strftime(now, &format));
    env
}

/// A filter that needs nothing but its arguments.
type Plain = fn(&[Value]) -> Result<Value, Error>;

fn add_filters(env: &mut Environment, now: i64) {
    let plain: [(&'static str, Plain); 42] = [
        ("tojson", json::to_json),
        ("length", filters::length),
        ("count", filters::length),
        ("list", filters::list),
        ("first", filters::first),
        ("last", filters::last),
        ("reverse", filters::reverse),
        ("items", filters::pairs),
        ("default", filters::default),
        ("d", filters::default),
        ("attr", filters::attr),
        ("dictsort", filters::dictsort),
        ("sort", filters::sorted),
        ("min", |args| filters::extreme("min", args)),
        ("max", |args| filters::extreme("max", args)),
        ("unique", filters::unique),
        ("int", filters::to_int),
        ("float", filters::to_float),
        ("escape", |args| text_filters::escape(args, false)),
        ("e", |args| text_filters::escape(args, false)),
        ("forceescape", |args| text_filters::escape(args, true)),
        ("string", text_filters::to_text),
        ("upper", |args| text_filters::cased("upper", args)),
        ("lower", |args| text_filters::cased("lower", args)),
        ("capitalize", |args| text_filters::cased("capitalize", args)),
        ("title", text_filters::title),
        ("trim", text_filters::trim),
        ("replace", text_filters::replace),
        ("join", text_filters::join),
        ("center", text_filters::center),
        ("format", text_filters::format),
        ("indent", text_filters::indent),
        ("filesizeformat", text_filters::filesize),
        ("truncate", text_filters::truncate),
        ("wordcount", text_filters::wordcount),
        ("wordwrap", text_filters::wordwrap),
        ("striptags", text_filters::striptags),
        ("urlencode", text_filters::urlencode),
        ("xmlattr", text_filters::xmlattr),
        ("pprint", text_filters::pprint),
        // Operators and loops were rewritten into these.
        ("fold__", operators::fold),
        ("iterated__", |args| operators::iterated(args.first().cloned().unwrap_or_default())),
    ];
    for (name, filter) in plain {
        env.add_filter(name, move |args: Rest<Value>, named: Kwargs| filter(&args::joined(args, named)));
    }
    env.add_filter("random", move |args: Rest<Value>| filters::random(&args, now));
    env.add_filter("map", |state: &mut State, args: Rest<Value>, named: Kwargs| {
        filters::map(state, &args::joined(args, named))
    });
    for (name, keeps, by_attribute) in
        [("select", true, false), ("reject", false, false), ("selectattr", true, true), ("rejectattr", false, true)]
    {
        env.add_filter(name, move |state: &mut State, args: Rest<Value>, named: Kwargs| {
            filters::select(state, &args::joined(args, named), keeps, by_attribute)
        });
    }
}

fn add_tests(env: &mut Environment) {
    env.add_test("callable", |value: &Value| filters::is_callable(value));
    env.add_test("sequence", |value: &Value| values::is_sequence(value));
    env.add_test("mapping", |value: &Value| value.kind() == ValueKind::Map && !methods::is_namespace(value));
    env.add_test("iterable", |value: &Value| {
        let kind = value.kind();
        matches!(
            kind,
            ValueKind::Undefined | ValueKind::String | ValueKind::Bytes | ValueKind::Seq | ValueKind::Iterable
        ) || (kind == ValueKind::Map && !methods::is_namespace(value))
    });
    order_test(env, &["lt", "lessthan", "<"], Ordering::is_lt);
    order_test(env, &["le", "<="], Ordering::is_le);
    order_test(env, &["gt", "greaterthan", ">"], Ordering::is_gt);
    order_test(env, &["ge", ">="], Ordering::is_ge);
}

/// A test that holds for values in some orders.
fn order_test(env: &mut Environment, names: &[&'static str], holds: fn(Ordering) -> bool) {
    for name in names {
        env.add_test(*name, move |a: &Value, b: &Value| operators::order(a, b).map(holds));
    }
}

/// `namespace(...)`: of a dict, of named values, or of both.
fn namespace(original: &Value, state: &mut State, args: &[Value]) -> Result<Value, Error> {
    let (placed, named) = args::split(args);
    let mut all: Vec<(Value, Value)> = Vec::new();
    for map in placed {
        match map.as_object().and_then(|map| map.try_iter_pairs()) {
            Some(pairs) if map.kind() == ValueKind::Map => all.extend(pairs),
            _ => return Err(wrong("namespace takes a dict")),
        }
    }
    all.extend(named.into_iter().map(|(name, value)| (Value::from(name), value)));
    original.call(state, &[values::dict(all)])
}
