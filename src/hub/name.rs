//! What a model of the hub is called, in all the ways that people write it.

/// A model as people name it: `OWNER/MODEL`, or `OWNER/MODEL:FILE` for one GGUF file of several. The addresses of the hub's pages and
/// files, and names with the hub's host in front, say the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    /// `OWNER/MODEL`, as the hub knows it.
    pub repository: String,
    /// Which file: its name, with or without its folder, or a part of it that no other file's name has, such as `Q4_0`.
    pub file: Option<String>,
}

/// What stands in front of a name in an address.
const HOSTS: [&str; 4] = ["huggingface.co/", "www.huggingface.co/", "hf.co/", "www.hf.co/"];

/// The longest word of a name that the hub allows is 96 characters; files' names are longer.
const MAX_WORD: usize = 200;

impl Name {
    /// The name in `text`; `None` where it is none: the hub's names are two words of letters, digits, `-`, `_` and `.`. An address may
    /// lead to the repository, or to a file or folder of its branch `main`.
    pub fn parse(text: &str) -> Option<Name> {
        let (text, address) = match without_host(text) {
            Some(rest) => (rest, true),
            None => (text, false),
        };
        let (path, file) = text.split_once(':').map_or((text, None), |(path, file)| (path, Some(file)));
        let mut words = path.splitn(3, '/');
        let (owner, model, rest) = (words.next()?, words.next()?, words.next());
        let below = match rest {
            None => None,
            Some(rest) if address => below_main(rest)?,
            Some(_) => return None,
        };
        let file = match (below, file) {
            (Some(_), Some(_)) => return None,
            // Other programs call the file that they choose themselves so.
            (None, Some("latest")) => None,
            (below, file) => below.or(file),
        };
        let good =
            [owner, model].iter().all(|word| is_word(word)) && file.is_none_or(|file| file.split('/').all(is_word));
        good.then(|| Name { repository: format!("{owner}/{model}"), file: file.map(str::to_owned) })
    }
}

/// What stands behind the hub's host in an address, without the page's options; `None` where `text` is no address of the hub.
fn without_host(text: &str) -> Option<&str> {
    let text = ["https://", "http://"].iter().find_map(|scheme| text.strip_prefix(scheme)).unwrap_or(text);
    let rest = HOSTS.iter().find_map(|host| text.strip_prefix(host))?;
    Some(rest.split(['?', '#']).next().unwrap_or(rest).trim_end_matches('/'))
}

/// The file or folder that an address leads to below its repository: `Some(None)` where that is the repository's main page, `None` where
/// it is something else, such as another branch.
fn below_main(rest: &str) -> Option<Option<&str>> {
    let (page, rest) = rest.split_once('/')?;
    let (branch, path) = rest.split_once('/').map_or((rest, None), |(branch, path)| (branch, Some(path)));
    (["blob", "resolve", "tree", "raw"].contains(&page) && branch == "main").then_some(path)
}

/// Whether `word` is one that names of the hub consist of.
fn is_word(word: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    !word.is_empty() && !word.starts_with(['.', '-']) && word.len() <= MAX_WORD && word.chars().all(plain)
}

impl std::fmt::Display for Name {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Name { repository, file } = self;
        match file {
            Some(file) => write!(f, "{repository}:{file}"),
            None => f.write_str(repository),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_two_words_and_leads_out_of_no_folder() {
        assert_eq!(Name::parse("a-b/C_d.1").unwrap(), Name { repository: "a-b/C_d.1".into(), file: None });
        assert_eq!(Name::parse("a/b:Q4_0").unwrap().to_string(), "a/b:Q4_0");
        for text in ["demo", "a/b/c", "../b", "a/..", "/b", "a/", "a/b:", "a/b:../x", "a b/c", "./model", "a/-b", "é/b"]
        {
            assert_eq!(Name::parse(text), None, "{text}");
        }
    }

    #[test]
    fn addresses_of_the_hub_are_names() {
        for (text, name) in [
            ("hf.co/a/b", "a/b"),
            ("hf.co/a/b:Q4_0", "a/b:Q4_0"),
            ("hf.co/a/b:latest", "a/b"),
            ("https://huggingface.co/a/b", "a/b"),
            ("https://huggingface.co/a/b/", "a/b"),
            ("https://huggingface.co/a/b/tree/main", "a/b"),
            ("https://huggingface.co/a/b?library=x#top", "a/b"),
            ("https://huggingface.co/a/b/blob/main/m.Q4_0.gguf", "a/b:m.Q4_0.gguf"),
            (
                "https://huggingface.co/a/b/resolve/main/Q8_0/m-00001-of-00002.gguf?download=true",
                "a/b:Q8_0/m-00001-of-00002.gguf",
            ),
            ("https://huggingface.co/a/b/tree/main/Q8_0", "a/b:Q8_0"),
        ] {
            assert_eq!(Name::parse(text).map(|name| name.to_string()).as_deref(), Some(name), "{text}");
        }
        for text in [
            "https://huggingface.co/a",
            "https://huggingface.co/a/b/tree/other/Q8_0",
            "https://huggingface.co/a/b/blob/main/../x",
            "https://elsewhere.example/a/b",
            "hf.co/a/b/blob/main/x.gguf:Q4_0",
        ] {
            assert_eq!(Name::parse(text), None, "{text}");
        }
    }
}
