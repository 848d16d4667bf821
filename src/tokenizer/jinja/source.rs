//! A template's source, rewritten where Jinja2 and minijinja read it differently. The data between tags stays as it is, but for line breaks
//! and `raw` sections. Within tags, whole expressions are rewritten into others of the same grouping ([`super::expression`]).
//!
//! Line breaks are `\n` as in Jinja2. A `raw` section becomes a string, because minijinja drops the line break behind `{% raw %}`.
//! transformers' `{% generation %}` gives its body.

use super::expression;
use super::tokens::{Token, closing, tokens};

/// The template as minijinja has to see it to read it as Jinja2 would. A tag that is not understood stays as it is, and minijinja's compiler
/// says what is wrong with it.
pub fn rewritten(source: &str) -> String {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut out = String::with_capacity(source.len() + source.len() / 8);
    let mut rest = &source[..];
    // Whether what comes next begins a line: Jinja2 takes the spaces before a block only there.
    let mut line_begins = true;
    while let Some((at, tag)) = next_tag(rest) {
        let (data, behind) = rest.split_at(at);
        let end = match tag {
            Tag::Comment => behind.find("#}").map(|end| end + 2),
            Tag::Print | Tag::Block => closing(behind, if matches!(tag, Tag::Print) { "}}" } else { "%}" }),
        };
        let Some(end) = end else { break };
        let (tag_text, after) = behind.split_at(end);
        if matches!(tag, Tag::Block) && tag_name(tag_text) == "raw" {
            // Without its end everything behind it would be looked through again and again.
            let Some(raw) = Raw::read(tag_text, after) else { break };
            raw.write(data, line_begins, &mut out);
            rest = raw.rest;
            line_begins = raw.ends_line;
            continue;
        }
        out.push_str(data);
        match tag {
            Tag::Comment => out.push_str(tag_text),
            Tag::Print | Tag::Block => out.push_str(&rewritten_tag(tag_text)),
        }
        rest = after;
        line_begins = !matches!(tag, Tag::Print) && rest.starts_with('\n') && !tag_text.ends_with("+%}");
    }
    out.push_str(rest);
    out
}

#[derive(Clone, Copy)]
enum Tag {
    Print,
    Block,
    Comment,
}

/// Where the next tag begins, and which.
fn next_tag(source: &str) -> Option<(usize, Tag)> {
    let mut from = 0;
    loop {
        let at = from + source[from..].find('{')?;
        match source.as_bytes().get(at + 1) {
            Some(b'{') => return Some((at, Tag::Print)),
            Some(b'%') => return Some((at, Tag::Block)),
            Some(b'#') => return Some((at, Tag::Comment)),
            _ => from = at + 1,
        }
    }
}

/// The first word of a block's tag.
fn tag_name(tag: &str) -> &str {
    let inner = tag[2..].trim_start_matches(['-', '+']).trim_start();
    let end = inner.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(inner.len());
    &inner[..end]
}

/// A tag's opening with its sign, what is within, and its end with its sign.
fn parts(tag: &str) -> (&str, &str, &str) {
    let begin = if tag[2..].starts_with(['-', '+']) { 3 } else { 2 };
    let end = tag.len() - 2;
    let end = if end > begin && tag[..end].ends_with(['-', '+']) { end - 1 } else { end };
    (&tag[..begin], &tag[begin..end], &tag[end..])
}

fn rewritten_tag(tag: &str) -> String {
    let (open, inner, close) = parts(tag);
    // `{{ x +}}` has no sign: the plus is part of the expression, and an error.
    let Some(tokens) =
        tokens(inner).filter(|_| !(tag.starts_with("{{") && (open.ends_with('+') || close.starts_with('+'))))
    else {
        return tag.to_owned();
    };
    let body = match tag.starts_with("{{") {
        true => expression::printed(&tokens),
        false => statement(&tokens),
    };
    match body {
        Some(body) => format!("{open}{body}{close}"),
        None => tag.to_owned(),
    }
}

fn statement(tokens: &[Token]) -> Option<String> {
    let (name, rest) = tokens.split_first()?;
    match name.text {
        "generation" if rest.is_empty() => Some(" if true ".into()),
        "endgeneration" if rest.is_empty() => Some(" endif ".into()),
        "for" => {
            let into = rest.iter().position(|t| t.text == "in")?;
            let (targets, iterated) = rest.split_at(into + 1);
            let end = outside(iterated, |t| matches!(t.text, "if" | "recursive")).unwrap_or(iterated.len());
            let (iterated, more) = iterated.split_at(end);
            let iterated = expression::rewritten(iterated)?;
            let more = expression::rewritten(more)?;
            Some(format!("{}{} ({iterated})|iterated__{more} ", name.spaced(), expression::copied(targets)))
        }
        // The targets of the assignment stay as they are.
        "set" => match outside(rest, |t| t.text == "=") {
            Some(at) => {
                let (targets, value) = rest.split_at(at + 1);
                let value = expression::rewritten(value)?;
                // Whatever can be iterated is unpacked.
                let value =
                    if outside(targets, |t| t.text == ",").is_some() { format!(" ({value})|list") } else { value };
                Some(format!("{}{}{value} ", name.spaced(), expression::copied(targets)))
            }
            None => Some(format!("{}{} ", name.spaced(), expression::rewritten(rest)?)),
        },
        "if" | "elif" | "with" | "call" | "filter" | "macro" => {
            Some(format!("{}{} ", name.spaced(), expression::rewritten(rest)?))
        }
        _ => None,
    }
}

/// Where the first such token outside of brackets is.
fn outside(tokens: &[Token], wanted: impl Fn(&Token) -> bool) -> Option<usize> {
    let mut depth = 0usize;
    tokens.iter().position(|token| {
        match token.text {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth == 0 && wanted(token)
    })
}

/// A `raw` section.
struct Raw<'a> {
    content: &'a str,
    /// `-`, `+` or nothing, of the tag that begins it.
    begin_sign: &'a str,
    strips_behind: bool,
    rest: &'a str,
    ends_line: bool,
}

impl<'a> Raw<'a> {
    /// `None` where its end is missing, or its tags are not `raw` and `endraw` alone.
    fn read(tag: &'a str, after: &'a str) -> Option<Raw<'a>> {
        let (open, inner, close) = parts(tag);
        if inner.trim() != "raw" || close.starts_with('+') {
            return None;
        }
        let body = if close.starts_with('-') { after.trim_start() } else { after };
        let mut from = 0;
        loop {
            let at = from + body[from..].find("{%")?;
            let length = body[at + 2..].find("%}")? + 4;
            let (open_end, inner, close) = parts(&body[at..at + length]);
            if inner.trim() != "endraw" {
                from = at + 2;
                continue;
            }
            let (content, rest) = (&body[..at], &body[at + length..]);
            let content = match &open_end[2..] {
                "-" => content.trim_end(),
                "+" => content,
                _ => without_indent(content, body.len() < after.len()),
            };
            let ends_line = !close.starts_with(['-', '+']) && rest.starts_with('\n');
            let rest = if ends_line { &rest[1..] } else { rest };
            return Some(Raw {
                content,
                begin_sign: &open[2..],
                strips_behind: close.starts_with('-'),
                rest,
                ends_line,
            });
        }
    }

    /// The data before it and the section as a string.
    fn write(&self, data: &str, line_begins: bool, out: &mut String) {
        out.push_str(match self.begin_sign {
            "-" => data.trim_end(),
            "+" => data,
            _ => without_indent(data, line_begins),
        });
        let open = if self.begin_sign == "-" { "{{-" } else { "{{" };
        let close = if self.strips_behind { "-}}" } else { "}}" };
        out.push_str(&format!("{open} {} {close}", expression::literal(self.content)));
    }
}

/// Data before a block, without the spaces on the block's line if nothing else is there.
fn without_indent(data: &str, line_begins: bool) -> &str {
    let line = data.rfind('\n').map_or(0, |at| at + 1);
    match (line > 0 || line_begins) && data[line..].chars().all(char::is_whitespace) {
        true => &data[..line],
        false => data,
    }
}

#[cfg(test)]
mod tests {
    use super::rewritten;

    #[test]
    fn what_both_read_alike_stays_as_it_is() {
        for source in [
            "a { b } {{ x.y }} {% if a == 'b' %}c{% endif %} {# {{ #} {",
            "{{ f(1, 'x', y=2)|join(', ') }}{%- set a = [1, {'b': 2}] -%}",
            "{% for",
            "{{ 'open",
        ] {
            assert_eq!(rewritten(source), source);
        }
    }

    #[test]
    fn generation_tags_give_their_body() {
        let source = "a{%- generation %}b{% endgeneration -%}c{% if x %}d{% endif %}{% raw";
        assert_eq!(rewritten(source), "a{%- if true %}b{% endif -%}c{% if x %}d{% endif %}{% raw");
    }

    /// `{%}` is no tag, and the process that rendered it failed.
    #[test]
    fn a_raw_section_holds_what_is_no_whole_tag() {
        assert_eq!(rewritten("{% raw %}{%}{% endraw %}"), "{{ '{%}' }}");
    }

    #[test]
    fn every_line_break_is_one_character() {
        assert_eq!(rewritten("a\r\n{{ x }}\r{# \r\n #}"), "a\n{{ x }}\n{# \n #}");
    }
}
