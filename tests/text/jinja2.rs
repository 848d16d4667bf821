//! Chat templates beside Jinja2: more than a thousand small templates for the filters, tests, methods, functions and syntax of its
//! documentation, each with what Jinja2 gives in the environment of transformers.
//!
//! The chats of published templates were rendered otherwise than transformers renders them: minijinja is not Jinja2, and 232 of these
//! templates differed.

use dynamicinfer::tokenizer::chat_template::{Input, render_in_process};
use serde_json::{Map, Value};
use std::path::Path;

/// Templates that still differ, each with what is behind it. None of it is seen in a published chat template.
const DIFFERENT: [(&str, &str); 28] = [
    // Jinja2 refuses it and minijinja's operators take it: a model whose template does this has no working chat anywhere.
    ("{{ 1 in 'abc1' }}", "`in` takes any value"),
    ("{{ none in 'abc' }}", "`in` takes any value"),
    ("{{ [] in pairs }}", "`in` takes any value"),
    ("{{ 'a' < 1 }}", "values of all kinds have an order"),
    ("{{ [1] < 1 }}", "values of all kinds have an order"),
    ("{{ pairs < {} }}", "values of all kinds have an order"),
    ("{{ 1 < none }}", "values of all kinds have an order"),
    ("{{ none < 1 }}", "values of all kinds have an order"),
    ("{{ missing < 1 }}", "values of all kinds have an order"),
    ("{{ 1 > missing }}", "values of all kinds have an order"),
    ("{% include 'x' ignore missing %}ok", "there are no other templates, which is no error here"),
    // Values that minijinja has not.
    ("{{ {1: 2, none: 3, true: 4}|tojson }}", "1, 1.0 and true are different keys"),
    ("{{ {1: 'a', 1.0: 'b', true: 'c'} }}", "1, 1.0 and true are different keys"),
    ("{{ range(2) == [0, 1] }}", "a range equals the list of its numbers"),
    ("{{ pairs.items()[0] }}", "the pairs of a dict can be indexed"),
    ("{{ numbers[1.0] }}", "1.0 is an index"),
    ("{{ -true }}", "truth values have no sign"),
    ("{{ (5).real }}", "numbers have no attributes"),
    ("{{ n.numerator }}", "numbers have no attributes"),
    ("{{ word['upper']() }}", "methods are no items"),
    ("{{ 'abc'.encode() }}", "there are no bytes"),
    ("{{ 'abc'.translate({97: 'x'}) }}", "there is no table of code points"),
    ("{{ 'abc'.maketrans('a', 'b') }}", "there is no table of code points"),
    // Only web pages need it.
    ("{{ 'see https://example.com/x?y=1 now'|urlize }}", "there is no filter `urlize`"),
    ("{{ lipsum is defined }}", "there is no function `lipsum`"),
    // Macros are minijinja's.
    (
        "{% macro m(a, b=2, c='x') %}[{{ a }}{{ b }}{{ c }}]{% endmacro %}{{ m(1) }}{{ m(1, 3) }}{{ m(1, c='z') }}{{ m(a=5) }}{{ m() }} \
         {{ m is callable }} {{ m.name }} {{ m.arguments }}",
        "the names of a macro's parameters are a list",
    ),
    ("{% macro m(a) %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, 3, x=4) }}", "macros take only what they name"),
    (
        "{% macro m(a, b=a) %}{{ a }}{{ b }}{% endmacro %}{{ m(1) }} {% macro r(n) %}{{ n }}{% if n > 0 %}{{ r(n - 1) }}{% endif %}\
         {% endmacro %}{{ r(3) }}",
        "a parameter's default does not see other parameters",
    ),
];

struct Table {
    now: i64,
    variables: Map<String, Value>,
    rows: Vec<Value>,
}

fn table() -> Table {
    let text = std::fs::read_to_string("tests/fixtures/jinja2.json").unwrap();
    let mut table: Value = serde_json::from_str(&text).unwrap();
    let Value::Object(variables) = table["variables"].take() else { panic!("no variables") };
    let Value::Array(rows) = table["rows"].take() else { panic!("no rows") };
    Table { now: table["now"].as_i64().unwrap(), variables, rows }
}

/// The text or the error of a template with the table's variables.
fn rendered(table: &Table, template: &str) -> Result<String, String> {
    let text = |name: &str| table.variables[name].as_str().unwrap().to_owned();
    let input = Input {
        template: template.to_owned(),
        messages: table.variables["messages"].as_array().unwrap().clone(),
        add_generation_prompt: true,
        bos_token: text("bos_token"),
        eos_token: text("eos_token"),
        other_tokens: [].into(),
        now: table.now,
        extras: table.variables.clone(),
    };
    render_in_process(&input, Path::new("t")).map_err(|error| error.to_string())
}

#[test]
fn every_construct_of_jinja2_gives_what_jinja2_gives() {
    let table = table();
    assert!(table.rows.len() > 1000);
    let mut wrong = Vec::new();
    for row in &table.rows {
        let template = row["template"].as_str().unwrap();
        let got = rendered(&table, template);
        let same = match row["text"].as_str() {
            Some(expected) => got.as_deref() == Ok(expected),
            None => got.is_err(),
        };
        let known = DIFFERENT.iter().any(|(different, _)| *different == template);
        match (same, known) {
            (false, false) => {
                wrong.push(format!("{template:?}\n  Jinja2: {}{}\n  here: {got:?}", row["text"], row["says"]))
            }
            (true, true) => wrong.push(format!("{template:?} is right: take it from the list of differences")),
            _ => {}
        }
    }
    assert!(wrong.is_empty(), "{} of {} templates:\n{}", wrong.len(), table.rows.len(), wrong.join("\n"));
}

/// Each entry of the list is a row of the table, so that none outlives it.
#[test]
fn every_difference_is_in_the_table() {
    let table = table();
    for (template, why) in DIFFERENT {
        assert!(table.rows.iter().any(|row| row["template"] == template), "{template}: {why}");
    }
}

/// A template's own words say why it takes no messages; everything else that goes wrong is the template's fault.
#[test]
fn what_a_template_raises_is_a_refusal() {
    let refused = rendered(&table(), "{{ raise_exception('no: ' ~ word) }}").unwrap_err();
    assert_eq!(refused, "the model's chat template does not take these messages: no: hello");
}
