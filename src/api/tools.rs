//! Functions that the model may ask its client to call (`tools`).
//!
//! A model whose chat template takes functions is told of them, and calls them, in the template's own format. Any other model has them
//! listed in the system message, and a call is an answer that is nothing but `{"name": ..., "arguments": {...}}`. In both cases a grammar
//! keeps a call to its form, and its arguments to the function's schema.

use super::error::ApiError;
use super::forms::Form;
use super::reading::Callable;
use super::schema_parts::reroot;
use super::unknown::{Given, Unknown, open_object};
use crate::error::excerpt;
use crate::tokenizer::chat_template::Message;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

/// Functions of a request, at most: OpenAI's limit.
const MAX_FUNCTIONS: usize = 128;
/// Bytes of a function's name, at most: Anthropic's limit; OpenAI's is half of it.
const MAX_NAME: usize = 128;

/// The functions that an answer may call.
#[derive(Clone, Debug)]
pub struct Tools {
    functions: Vec<Function>,
    /// Whether the answer has to be a call; if not, it may also be text.
    pub required: bool,
    /// JSON pointers of the request's tools that are no functions, and that the model is not told of.
    pub left_out: Vec<String>,
}

#[derive(Clone, Debug, Deserialize)]
struct Function {
    name: String,
    description: Option<String>,
    /// A JSON schema. `None`: the function has no arguments.
    parameters: Option<Value>,
    /// Whether a schema that no grammar can hold all of is refused. `None`: no, as much of it is enforced as can be.
    strict: Option<bool>,
    /// Accepted and ignored.
    #[serde(rename = "cache_control")]
    _cache_control: Option<Given>,
    /// Its place in the request, as a path (`tools.0.function`).
    #[serde(skip)]
    place: String,
    /// The name that `parameters` have in the request.
    #[serde(skip, default = "parameters")]
    schema_field: &'static str,
}

fn parameters() -> &'static str {
    "parameters"
}

/// A tool of a chat.
#[derive(Deserialize)]
struct Tool {
    #[serde(rename = "type")]
    kind: String,
    function: Function,
    /// Accepted and ignored.
    #[serde(rename = "cache_control")]
    _cache_control: Option<Given>,
}

open_object! {
    /// A tool of a response: a function, a custom tool, or what OpenAI's servers or some clients run.
    FlatTool {
        kind as "type": String,
        name as "name": String,
        description as "description": String,
        parameters as "parameters": Value,
        strict as "strict": bool,
        /// The form of a custom tool's input.
        format as "format": Value,
    }
}

open_object! {
    /// A tool of Anthropic's API: a function, or what Anthropic's servers or some clients run.
    MessagesTool {
        /// `None` is `custom`: a function.
        kind as "type": String,
        name as "name": String,
        description as "description": String,
        input_schema as "input_schema": Value,
        strict as "strict": bool,
    }
}

impl Tools {
    /// Reads the fields `tools` and `tool_choice` of a chat. `None` where nothing may be called.
    ///
    /// # Errors
    /// 400 that names the bad field.
    pub fn read(tools: Option<Value>, choice: Option<Value>, unknown: &Unknown) -> Result<Option<Tools>, ApiError> {
        let tools: Vec<Tool> = list(tools, unknown)?;
        let function = |(i, tool): (usize, Tool)| match tool.kind.as_str() {
            "function" => Ok(Function { place: format!("tools.{i}.function"), ..tool.function }),
            kind => {
                let message = format!("a tool of type '{}' cannot be called; only functions can", excerpt(kind));
                Err(ApiError::field(format!("tools.{i}.type"), message))
            }
        };
        let functions = tools.into_iter().enumerate().map(function).collect::<Result<_, _>>()?;
        Tools::of(functions, choice.as_ref(), Vec::new())
    }

    /// Reads the same fields of a response. A custom tool is a function of one text. Other tools are left out: nothing here runs them.
    ///
    /// # Errors
    /// 400 that names the bad field.
    pub fn read_flat(
        tools: Option<Value>,
        choice: Option<Value>,
        unknown: &Unknown,
    ) -> Result<Option<Tools>, ApiError> {
        let tools: Vec<FlatTool> = list(tools, unknown)?;
        let (mut functions, mut left_out) = (Vec::new(), Vec::new());
        for (i, tool) in tools.into_iter().enumerate() {
            let FlatTool { kind, name, description, parameters, strict, format } = tool;
            match kind.as_deref() {
                Some("custom") => {
                    let (name, grammar) = (name.unwrap_or_default(), grammar_of(format.as_ref()));
                    left_out.extend(grammar.as_ref().map(|_| format!("/tools/{i}/format")));
                    let about: Vec<String> = description.into_iter().chain(grammar).collect();
                    let (about, at) = ((!about.is_empty()).then(|| about.join("\n")), (format!("tools.{i}"), "format"));
                    functions.push(Function::new(name, about, Some(custom_input()), None, at));
                }
                Some("function") => {
                    let (name, place) = (name.unwrap_or_default(), format!("tools.{i}"));
                    functions.push(Function::new(name, description, parameters, strict, (place, "parameters")));
                }
                Some(_) => left_out.push(format!("/tools/{i}")),
                None => return Err(ApiError::field(format!("tools.{i}.type"), "the type is missing; use function")),
            }
        }
        Tools::of(functions, choice.as_ref(), left_out)
    }

    /// Reads the field `tools` of Anthropic's API; `choice` is as in a response. Tools that are no functions are left out.
    ///
    /// # Errors
    /// 400 that names the bad field.
    pub fn read_messages(
        tools: Option<Value>,
        choice: Option<Value>,
        unknown: &Unknown,
    ) -> Result<Option<Tools>, ApiError> {
        let tools: Vec<MessagesTool> = list(tools, unknown)?;
        let (mut functions, mut left_out) = (Vec::new(), Vec::new());
        for (i, tool) in tools.into_iter().enumerate() {
            let MessagesTool { kind, name, description, input_schema, strict } = tool;
            if kind.is_none_or(|kind| kind == "custom") {
                let (name, place) = (name.unwrap_or_default(), (format!("tools.{i}"), "input_schema"));
                functions.push(Function::new(name, description, input_schema, strict, place));
            } else {
                left_out.push(format!("/tools/{i}"));
            }
        }
        Tools::of(functions, choice.as_ref(), left_out)
    }

    fn of(functions: Vec<Function>, choice: Option<&Value>, left_out: Vec<String>) -> Result<Option<Tools>, ApiError> {
        functions.iter().try_for_each(Function::check)?;
        if functions.len() > MAX_FUNCTIONS {
            let n = functions.len();
            return Err(ApiError::field("tools", format!("tools has {n} functions; give at most {MAX_FUNCTIONS}")));
        }
        let twice = |(i, f): &(usize, &Function)| functions[..*i].iter().any(|g| g.name == f.name);
        if let Some((_, twice)) = functions.iter().enumerate().find(twice) {
            return Err(ApiError::field(twice.place.clone() + ".name", format!("'{}' is defined twice", twice.name)));
        }
        let (functions, required) = chosen(functions, choice)?;
        Ok((!functions.is_empty()).then_some(Tools { functions, required, left_out }))
    }

    /// The functions as templates take them.
    pub fn told(&self) -> Value {
        let told = |f: &Function| {
            let about = f.description.as_deref().unwrap_or_default();
            let none = || json!({"type": "object", "properties": {}, "required": []});
            let parameters = f.parameters.clone().unwrap_or_else(none);
            json!({"type": "function", "function": {"name": f.name, "description": about, "parameters": parameters}})
        };
        self.functions.iter().map(told).collect()
    }

    /// What an answer may call.
    pub fn callable(&self) -> Vec<Callable> {
        let callable = |f: &Function| Callable { name: f.name.clone(), arguments: f.arguments() };
        self.functions.iter().map(callable).collect()
    }

    /// The messages with what can be called: in the system message, or before the first user's text where the model's template takes no
    /// system message. `json`: an answer that is no call is JSON.
    pub fn introduced(&self, mut messages: Vec<Message>, json: bool, takes_system: bool) -> Vec<Message> {
        let text = self.introduction(json);
        if let Some(system) = messages.first_mut().filter(|first| first.role == "system") {
            system.content = format!("{}\n\n{text}", system.content);
        } else if takes_system {
            messages.insert(0, Message::new("system", &text));
        } else if let Some(user) = messages.iter_mut().find(|message| message.role == "user") {
            user.content = format!("{text}\n\n{}", user.content);
        } else {
            messages.insert(0, Message::new("user", &text));
        }
        messages
    }

    fn introduction(&self, json: bool) -> String {
        let mut text = String::from(
            "You can call functions. To call one, answer with nothing but its name and arguments as JSON:\n\
             {\"name\": \"NAME\", \"arguments\": {...}}\n",
        );
        text.push_str(match (self.required, json) {
            (true, _) => "Answer with a call.",
            (false, true) => "If no call is needed, answer in JSON.",
            (false, false) => "If no call is needed, answer in plain text.",
        });
        text.push_str(" The functions, each with the JSON schema of its arguments:");
        for function in &self.functions {
            let about = function.description.as_ref().map_or(String::new(), |about| format!("{about} "));
            text.push_str(&format!("\n- {}: {about}{}", function.name, function.arguments()));
        }
        text
    }

    /// The forms of a call of each of the functions.
    pub fn forms(&self) -> Vec<Form> {
        self.functions.iter().map(Function::form).collect()
    }
}

/// The argument of a custom tool.
pub const CUSTOM_INPUT: &str = "input";

/// The schema of a custom tool's arguments: one text.
fn custom_input() -> Value {
    json!({
        "type": "object",
        "properties": {(CUSTOM_INPUT): {"type": "string"}},
        "required": [CUSTOM_INPUT],
        "additionalProperties": false,
    })
}

/// The grammar of a custom tool's input, as the model is told of it: none is enforced.
fn grammar_of(format: Option<&Value>) -> Option<String> {
    let format = format.filter(|format| format["type"] == "grammar")?;
    let (syntax, definition) = (format["syntax"].as_str().unwrap_or("lark"), format["definition"].as_str()?);
    Some(format!("The input follows this grammar ({}):\n{definition}", excerpt(syntax)))
}

/// Reads the list of tools.
fn list<T: DeserializeOwned>(tools: Option<Value>, unknown: &Unknown) -> Result<Vec<T>, ApiError> {
    unknown.read("tools", tools.unwrap_or_else(|| json!([])), &[]).map_err(|e| match e.code {
        Some(_) => e,
        None => ApiError::field("tools", format!("tools is invalid: {}", e.message)),
    })
}

/// Checks the name of a function; `field` is its place in the request.
///
/// # Errors
/// 400 that names the field.
pub fn check_name(field: &str, name: &str) -> Result<(), ApiError> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
    if (1..=MAX_NAME).contains(&name.len()) && name.bytes().all(plain) {
        return Ok(());
    }
    let name = excerpt(name);
    let message = format!("'{name}' is not a function name: use 1 to {MAX_NAME} letters, digits, _ and -");
    Err(ApiError::field(field, message))
}

/// The functions that `tool_choice` leaves, and whether one has to be called.
fn chosen(functions: Vec<Function>, choice: Option<&Value>) -> Result<(Vec<Function>, bool), ApiError> {
    const USE: &str = "use none, auto, required, or {\"type\": \"function\", ...} with the function's name";
    let refuse = |why: &str| Err(ApiError::field("tool_choice", why));
    // A chat has the name in `function`, a response has it beside the type.
    let name = |tool: &Value| tool["function"]["name"].as_str().or(tool["name"].as_str()).map(str::to_owned);
    match choice {
        None => Ok((functions, false)),
        Some(Value::String(word)) => match word.as_str() {
            "auto" => Ok((functions, false)),
            "none" => Ok((Vec::new(), false)),
            "required" if functions.is_empty() => refuse("a call is required, but tools is empty"),
            "required" => Ok((functions, true)),
            _ => refuse(USE),
        },
        Some(choice) if choice["type"] == "allowed_tools" => {
            let allowed = if choice["allowed_tools"].is_object() { &choice["allowed_tools"] } else { choice };
            let names: Vec<String> = allowed["tools"].as_array().into_iter().flatten().filter_map(name).collect();
            if let Some(unknown) = names.iter().find(|name| !functions.iter().any(|f| f.name == **name)) {
                return refuse(&format!("'{}' is not one of the tools", excerpt(unknown)));
            }
            let left = functions.into_iter().filter(|f| names.contains(&f.name)).collect();
            let mode = allowed.get("mode").and_then(Value::as_str).unwrap_or("auto");
            chosen(left, Some(&mode.into()))
        }
        Some(choice) => {
            match name(choice).filter(|_| ["function", "custom"].iter().any(|kind| choice["type"] == *kind)) {
                None => refuse(USE),
                Some(name) => match functions.into_iter().find(|f| f.name == name) {
                    None => refuse(&format!("'{}' is not one of the tools", excerpt(name))),
                    Some(function) => Ok((vec![function], true)),
                },
            }
        }
    }
}

impl Function {
    /// One whose place in the request, and the name of its schema there, are `at`.
    fn new(
        name: String,
        description: Option<String>,
        parameters: Option<Value>,
        strict: Option<bool>,
        at: (String, &'static str),
    ) -> Function {
        let (place, schema_field) = at;
        Function { name, description, parameters, strict, _cache_control: None, place, schema_field }
    }

    fn check(&self) -> Result<(), ApiError> {
        check_name(&format!("{}.name", self.place), &self.name)?;
        if self.parameters.as_ref().is_some_and(|schema| !schema.is_object()) {
            let field = self.schema_field;
            let message = format!("{field} must be a JSON schema of an object");
            return Err(ApiError::field(format!("{}.{field}", self.place), message));
        }
        Ok(())
    }

    /// The JSON schema of its arguments.
    fn arguments(&self) -> Value {
        let none = || json!({"type": "object", "properties": {}, "additionalProperties": false});
        self.parameters.clone().unwrap_or_else(none)
    }

    /// The form of a call of it.
    fn form(&self) -> Form {
        const ARGUMENTS: &str = "/properties/arguments";
        let mut arguments = self.arguments();
        if arguments.get("type").is_none() && arguments.get("$ref").is_none() {
            arguments["type"] = "object".into();
        }
        reroot(&mut arguments, &format!("#{ARGUMENTS}"));
        let schema = json!({
            "type": "object",
            "properties": {"name": {"const": self.name}, "arguments": arguments},
            "required": ["name", "arguments"],
            "additionalProperties": false,
        });
        let place = format!("/{}/{}", self.place.replace('.', "/"), self.schema_field);
        Form { schema, strict: Some(self.strict == Some(true)), given: ARGUMENTS, place }
    }
}

/// A call that an answer is.
#[derive(Clone, Debug, PartialEq)]
pub struct FunctionCall {
    /// The function's name.
    pub name: String,
    /// The arguments as JSON, letter by letter as the model wrote them: numbers may have more digits than any type here holds.
    pub arguments: String,
}

impl FunctionCall {
    /// The call in the model's own words, for the turns that follow.
    pub fn said(name: &str, arguments: &str) -> String {
        let arguments = if arguments.trim().is_empty() { "{}" } else { arguments };
        format!("{{\"name\": {}, \"arguments\": {arguments}}}", json!(name))
    }

    /// The object in `tool_calls`.
    pub fn json(&self, id: &str) -> Value {
        json!({
            "id": id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::forms::Forms;

    fn read(tools: Value, choice: Value) -> Result<Option<Tools>, ApiError> {
        Tools::read(Some(tools), Some(choice).filter(|choice| !choice.is_null()), &Unknown::default())
    }

    fn function(name: &str, parameters: Value) -> Value {
        json!({"type": "function", "function": {"name": name, "parameters": parameters}})
    }

    #[test]
    fn references_of_a_functions_schema_still_point_to_its_own_definitions() {
        let parameters =
            json!({"properties": {"at": {"$ref": "#/$defs/place"}}, "$defs": {"place": {"type": "string"}}});
        for n in 1..3 {
            let tools: Vec<Value> = (0..n).map(|i| function(&format!("f{i}"), parameters.clone())).collect();
            let tools = read(tools.into(), json!("required")).unwrap().unwrap();
            let schema = Forms(tools.forms()).schema();
            for i in 0..n {
                let call = if n == 1 { &schema } else { &schema["anyOf"][i] };
                let to = call["properties"]["arguments"]["properties"]["at"]["$ref"].as_str().unwrap();
                assert_eq!(schema.pointer(to.strip_prefix('#').unwrap()), Some(&json!({"type": "string"})), "{to}");
            }
        }
    }

    #[test]
    fn functions_are_introduced_where_the_template_lets_them_be_said() {
        let tools = read(json!([function("a", json!({}))]), Value::Null).unwrap().unwrap();
        let said = |messages: &[(&str, &str)], takes_system| {
            let messages = messages.iter().map(|(role, text)| Message::new(role, text)).collect();
            let said = tools.introduced(messages, false, takes_system).into_iter();
            said.map(|m| (m.role, m.content.replace(&tools.introduction(false), "TOOLS"))).collect::<Vec<_>>()
        };
        let pairs =
            |list: &[(&str, &str)]| list.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect::<Vec<_>>();
        let turns = [("user", "x"), ("assistant", "y"), ("user", "z")];
        assert_eq!(said(&turns[..1], true), pairs(&[("system", "TOOLS"), ("user", "x")]));
        assert_eq!(said(&turns, false), pairs(&[("user", "TOOLS\n\nx"), ("assistant", "y"), ("user", "z")]));
        assert_eq!(said(&turns[1..2], false), pairs(&[("user", "TOOLS"), ("assistant", "y")]));
        assert_eq!(said(&[("system", "s"), ("user", "x")], true), pairs(&[("system", "s\n\nTOOLS"), ("user", "x")]));
    }

    #[test]
    fn a_choice_leaves_the_functions_that_it_names_and_a_bad_one_is_refused() {
        let two = json!([function("a", json!({})), function("b", json!({}))]);
        let named = |name: &str| json!({"type": "function", "function": {"name": name}});
        let left = |choice: Value| read(two.clone(), choice).unwrap().map(|t| (t.functions.len(), t.required));
        assert_eq!(left(Value::Null), Some((2, false)));
        assert_eq!(left(json!("auto")), Some((2, false)));
        assert_eq!(left(json!("none")), None);
        assert_eq!(left(json!("required")), Some((2, true)));
        assert_eq!(left(named("b")), Some((1, true)));
        for bad in [named("c"), json!("some"), json!({"type": "code"}), json!(5)] {
            assert_eq!(read(two.clone(), bad).unwrap_err().param.as_deref(), Some("tool_choice"));
        }
        for (tools, param) in [
            (json!([{"type": "web_search"}]), "tools"),
            (json!([function("a b", json!({}))]), "tools.0.function.name"),
            (json!([function("a", json!(5))]), "tools.0.function.parameters"),
            (json!([function("a", json!({})), function("a", json!({}))]), "tools.1.function.name"),
        ] {
            assert_eq!(read(tools, Value::Null).unwrap_err().param.as_deref(), Some(param));
        }
    }
}
