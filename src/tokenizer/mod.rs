//! Text to tokens and back.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub struct TokenizerSpec;
impl TokenizerSpec {
    pub fn from_hf_dir(_: &std::path::Path) -> crate::Result<TokenizerSpec> { Ok(TokenizerSpec) }
    pub fn from_gguf(_: &crate::formats::gguf::Metadata, _: &std::path::Path) -> crate::Result<TokenizerSpec> { Ok(TokenizerSpec) }
}
