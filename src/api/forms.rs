//! The forms that an answer may have, as one schema: calls of functions, and the `response_format`.

use super::call_grammar::NativeCalls;
use super::error::{ApiError, unsupported};
use super::reading::Thoughts;
use super::schema_bounds::pointer;
use super::schema_parts::{Way, reroot};
use serde_json::{Value, json};

/// One form that an answer may have.
#[derive(Clone, Debug)]
pub struct Form {
    /// Its JSON schema; references in it begin at its own root.
    pub schema: Value,
    /// Whether all of the schema has to be enforced. `None`: every grammar holds all of it.
    pub strict: Option<bool>,
    /// JSON pointer of the part of `schema` that the request gave.
    pub given: &'static str,
    /// JSON pointer of that part in the request.
    pub place: String,
}

/// The forms of one answer, calls of functions first.
pub struct Forms(pub Vec<Form>);

/// What an answer is to be.
pub struct AnswerForms {
    /// One of these, at least one.
    pub forms: Forms,
    /// So many of them are calls of functions.
    pub calls: usize,
    /// An answer that does not begin with a call may be any text.
    pub or_text: bool,
    /// How calls are written, where that is the model's own way; `None`: as the forms say.
    pub native: Option<NativeCalls>,
    /// How thoughts before the answer are written, and whether it begins within them.
    pub thoughts: Option<(Thoughts, bool)>,
}

impl AnswerForms {
    /// The field of the request that requires them; for calls that of the functions.
    pub fn field(&self) -> &'static str {
        if self.calls > 0 { "tools" } else { "response_format" }
    }

    /// Whether any JSON object will do.
    pub fn is_any_object(&self) -> bool {
        matches!(&self.forms.0[..], [only] if only.strict.is_none())
    }

    /// Whether all of every schema has to be enforced.
    pub fn strict(&self) -> bool {
        self.forms.0.iter().all(|form| form.strict != Some(false))
    }

    /// The forms that must be enforced whole, although parts of others may be left out, by the field that requires them.
    pub fn strict_beside_others(&self) -> Vec<(&'static str, Forms)> {
        if self.strict() {
            return Vec::new();
        }
        let (calls, formats) = self.forms.0.split_at(self.calls);
        let whole = |forms: &[Form]| Forms(forms.iter().filter(|form| form.strict == Some(true)).cloned().collect());
        let by_field = [("tools", whole(calls)), ("response_format", whole(formats))];
        by_field.into_iter().filter(|(_, forms)| !forms.0.is_empty()).collect()
    }
}

impl Forms {
    /// The schema of an answer in any of the forms.
    pub fn schema(&self) -> Value {
        match &self.0[..] {
            [only] => only.schema.clone(),
            several => {
                let form = |(i, form): (usize, &Form)| {
                    let mut schema = form.schema.clone();
                    reroot(&mut schema, &format!("#/anyOf/{i}"));
                    schema
                };
                json!({"anyOf": several.iter().enumerate().map(form).collect::<Vec<_>>()})
            }
        }
    }

    /// The form that a part of [`Forms::schema`] is in, and the steps to the part from there.
    fn of<'a>(&self, way: &'a Way) -> (Option<&Form>, &'a [String]) {
        match (&self.0[..], &way[..]) {
            ([only], rest) => (Some(only), rest),
            (several, [_, i, rest @ ..]) => (i.parse::<usize>().ok().and_then(|i| several.get(i)), rest),
            (_, rest) => (None, rest),
        }
    }

    /// Refuses parts of [`Forms::schema`] that calls are not kept to, if the request wants all of their form.
    ///
    /// # Errors
    /// 400 with the place of the first.
    pub fn refuse_strict(&self, not_held: &[Way]) -> Result<(), ApiError> {
        match not_held.iter().find(|way| self.of(way).0.is_some_and(|form| form.strict == Some(true))) {
            None => Ok(()),
            Some(way) => Err(unsupported(format!(
                "{} cannot be held in the model's own format of calls; leave it out, or set strict to false",
                pointer(way)
            ))),
        }
    }

    /// The JSON pointer, in the request, of a part of [`Forms::schema`].
    pub fn place(&self, way: &Way) -> String {
        let (form, rest) = self.of(way);
        let whole = if rest.is_empty() { String::new() } else { pointer(rest) };
        let inner = form.and_then(|form| Some(format!("{}{}", form.place, whole.strip_prefix(form.given)?)));
        inner.unwrap_or(whole)
    }

    /// A refusal of [`Forms::schema`] as one of the request's field `field`, with places in the request.
    pub fn refused(&self, field: &str, error: ApiError) -> ApiError {
        let param = error.param.as_ref().map(|_| field.to_owned());
        ApiError { param, message: self.placed(&error.message), ..error }
    }

    fn placed(&self, message: &str) -> String {
        let several = self.0.len() > 1;
        let root = |i: usize| if several { format!("/anyOf/{i}") } else { String::new() };
        let there: Vec<String> = self.0.iter().enumerate().map(|(i, form)| root(i) + form.given).collect();
        // A place is a word. From the back: /anyOf/1 begins /anyOf/10, too.
        let placed = |word: &str| {
            let mut forms = there.iter().zip(&self.0).rev().filter(|(there, _)| !there.is_empty());
            let found = forms.find_map(|(there, form)| Some(form.place.clone() + word.strip_prefix(&**there)?));
            found.unwrap_or_else(|| word.to_owned())
        };
        message.split(' ').map(placed).collect::<Vec<_>>().join(" ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_names_places_in_the_request() {
        let form = |i: usize| Form { schema: json!({}), strict: None, given: "/a", place: format!("/tools/{i}/b") };
        let placed = |n: usize, message: &str| Forms((0..n).map(form).collect()).placed(message);
        assert_eq!(placed(11, "see /anyOf/1/a/x, /anyOf/10/a"), "see /tools/1/b/x, /tools/10/b");
        assert_eq!(placed(2, "/anyOf/0/a/anyOf/1/a: no"), "/tools/0/b/anyOf/1/a: no");
        assert_eq!(placed(1, "/a/a: no"), "/tools/0/b/a: no");
    }
}
