#!/usr/bin/env python3
"""Makes tests/fixtures/tokenizers/words.json: the words into which the pre-tokenisers that GGUF files name cut hard texts, by the
`tokenizers` library of Python and its regex engine (Oniguruma), which is another than that of the Rust library.

    python3 -m venv ref && ref/bin/pip install tokenizers==0.23.3
    ref/bin/python tools/reference/make_words.py

The regexes are those of the models' tokenizer.json, or where none is known those that llama.cpp documents; counts from the end of a number
are without the bound that the program has. `tools/real_tokenizers.py` compares the same names with llama.cpp itself.
"""
import json
from pathlib import Path

from tokenizers import Regex, pre_tokenizers

OUT = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "tokenizers" / "words.json"

TEXTS = [
    "We'VE seen JSONParser's aBC, it'S theY'll HelloWorld o'neil don't I'D",
    "12345,67 1234567 123456789 3.14159 x1234y ½ 1½345 ٣٤٥٦ Ⅷ 2026-11-27",
    "a//b\n\n  x</p>\n/\n\tif (x != y) { return; }  // end\r\n\r\n   z",
    "Ünïcode ǅ中文字 ЖУК жук'll 日本語カタカナ漢字 한국어 ไทยภาษา हिन्दी नमस्ते ქართული Ⴀ Ελλάδα",
    "e\u0301te\u0301 cafe\u0301 A\u030aB x\u0327\u0301y \u1100\u1161\u11a8",
    "👩‍👩‍👧‍👦 😀!!  (a|b) [c] {d} ~`^ §§ … «q» “r” ，。！？、：",
    "  two   three    four" + " " * 40 + "end \u00a0 nbsp\u2003em  ",
    "\n\n\n\n a\n b \t\t\tc  \n",
    "IMGIMGABCDEZ <sentinel:12> _under_score__ @user #tag http://a.b/c?d=e&f=1",
    "ﬁ ﬂ Ａｂｃ１２３ ａ＋ｂ＝ｃ 〈x〉 一二三ABC四五 １２３４５６",
    "ab\u0004a !\u0004! \u007f \u200b\u200d\ufeff x",
    "the quick BROWN fOX jumped OVER 1000000 lazy DOGs' back.Then?Yes.",
]

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def like_llama3(digits, letters=r"\p{L}", others=r" ?[^\s\p{L}\p{N}]+[\r\n]*", english=ENGLISH + "|", spaces=SPACES):
    return english + r"[^\r\n\p{L}\p{N}]?" + letters + "+|" + digits + "|" + others + "|" + spaces


def like_o200k(digits, english=ENGLISH + "?", letters="", behind=r"[\r\n/]*"):
    upper = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}" + letters + "]"
    lower = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}" + letters + "]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (before + upper + "*" + lower + "+" + english + "|" + before + upper + "+" + lower + "*" + english + "|" + digits
            + r"| ?[^\s\p{L}\p{N}]+" + behind + "|" + SPACES)


QWEN2 = like_llama3(r"\p{N}")
LLAMA3 = like_llama3(r"\p{N}{1,3}")
O200K = like_o200k(r"\p{N}{1,3}")
PUNCTUATED = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
DEEPSEEK3 = PUNCTUATED + r"| ?[\p{P}\p{S}]+[\r\n]*|" + SPACES
CJK = "[一-龥぀-ゟ゠-ヿ]+"
HAN = "[一-龥ࠀ-一가-퟿]+"
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
POWERS = "|".join(r"\s{%d}(?!\S)" % (1 << n) for n in range(9, 1, -1)) + r"|\s{1,2}(?!\S)|\s{1}"
CASED = [  # of deepseek-llm: letters of scripts with capitals, ends of ranges
    (0x41, 0x5a), (0x61, 0x7a), (0xb5,), (0xc0, 0xd6), (0xd8, 0xf6), (0xf8, 0x1ba), (0x1bc, 0x1bf), (0x1c4, 0x293), (0x295, 0x2af),
    (0x370, 0x373), (0x376,), (0x377,), (0x37b, 0x37d), (0x37f,), (0x386,), (0x388, 0x38a), (0x38c,), (0x38e, 0x3a1), (0x3a3, 0x3f5),
    (0x3f7, 0x481), (0x48a, 0x52f), (0x531, 0x556), (0x10a0, 0x10c5), (0x13a0, 0x13f5), (0x13f8, 0x13fd), (0x1c90, 0x1cba),
    (0x1cbd, 0x1cbf), (0x1d00, 0x1d2b), (0x1d6b, 0x1d77), (0x1d79, 0x1d9a), (0x1e00, 0x1f15), (0x1f18, 0x1f1d), (0x1f20, 0x1f45),
    (0x1f48, 0x1f4d), (0x1f50, 0x1f57), (0x1f59,), (0x1f5b,), (0x1f5d,), (0x1f5f, 0x1f7d), (0x1f80, 0x1fb4), (0x1fb6, 0x1fbc),
    (0x1fbe,), (0x1fc2, 0x1fc4), (0x1fc6, 0x1fcc), (0x1fd0, 0x1fd3), (0x1fd6, 0x1fdb), (0x1fe0, 0x1fec), (0x1ff2, 0x1ff4),
    (0x1ff6, 0x1ffc), (0xff21, 0xff3a), (0xff41, 0xff5a), (0xfb00, 0xfb06), (0xfb13, 0xfb17),
]
LETTERS = r"\s?[" + "".join("-".join(chr(end) for end in ends) for ends in CASED) + "]+"
NO_SPACES = "[一-鿿㐀-䶿\uf900-\ufaff぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+"

# The regexes that cut one after the other, and the names that have them.
RULES = [
    ([r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"], "default"),
    ([GPT2], "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe gigachat a.x-4.0 mellum modern-bert jais "
             "trillion granite-docling exaone4 mpt olmo"),
    ([LLAMA3], "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano dbrx smaug-bpe glm4 chatglm-bpe"),
    ([r"\p{N}{1,3}", like_llama3(r"\p{N}+")], "minicpm5"),
    ([like_llama3(r"\p{N}{1,3}", spaces=r"\s*[\r\n]+|" + POWERS)], "jais-2"),
    ([QWEN2], "qwen2 deepseek-r1-qwen f2llmv2 stablelm2 hunyuan megrez kormo solar-open grok-2"),
    ([like_llama3(r"\p{N}", r"[\p{L}\p{M}]", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*")], "qwen35"),
    ([like_llama3(r"\p{N}", english="")], "ufakzeka"),
    (["[^\n]+|[\n]+", QWEN2], "laguna"),
    ([like_llama3(r"\p{N}{1}", others=r" ?[^\s\p{L}\p{N}\r\n]+")], "seed-coder"),
    ([r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"],
     "bailingmoe bailingmoe2 llada-moe"),
    ([ENGLISH + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"],
     "exaone-moe"),
    ([r"\p{N}", GPT2], "starcoder refact smollm codeshell exaone minerva-7b mellum2 command-r"),
    ([r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"], "falcon"),
    ([like_o200k(r"\p{N}", english="")], "tekken"),
    ([O200K], "gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m"),
    ([r"\d{1,3}(?=(?:\d{3})*\b)", O200K], "tiny_aya cohere2moe"),
    (["[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+", like_o200k(r"\p{N}")], "youtu"),
    ([r"[\p{Han}]+|" + like_o200k(r"\p{N}{1,3}", letters=r"&&[^\p{Han}]", behind=r"[\r\n]*")], "kimi-k2"),
    ([r"\p{N}+", r"(?=(\d{3})+(?!\d))"], "superbpe"),
    ([r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", NO_SPACES, DEEPSEEK3], "afmoe"),
    (["<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", "([\t\n]|    |  )", r"\p{N}", r"[\p{P}!-/:-@\[-`{-~]", GPT2],
     "chameleon"),
    (["[\r\n]", LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", HAN, r"\p{N}+"], "deepseek-llm"),
    (["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN, r"\p{N}"], "deepseek-coder"),
    ([r"\p{N}{1,3}", CJK, DEEPSEEK3], "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    ([r"\p{N}{1,3}", CJK, PUNCTUATED + r"| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"], "spark2_5"),
    ([BLOOM], "poro-chat bloom gpt3-finnish"),
    ([BLOOM, r"\p{N}"], "viking"),
    (["[^\n]+|[\n]+"], "gemma4 granite-embed-multi-311m sarvam-moe"),
    ([r"\S+"], "whitespace"),
]


def main():
    rules = []
    for regexes, names in RULES:
        cut = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), "isolated") for regex in regexes])
        words = [[word for word, _ in cut.pre_tokenize_str(text)] for text in TEXTS]
        assert all("".join(of) == text for of, text in zip(words, TEXTS)), names
        rules.append({"names": names.split(), "words": [[len(word) for word in of] for of in words]})
    lines = ",\n".join("  " + json.dumps(rule, ensure_ascii=True) for rule in rules)
    texts = json.dumps(TEXTS, ensure_ascii=True)
    OUT.write_text('{"texts": ' + texts + ',\n "rules": [\n' + lines + "\n]}\n")
    print(OUT, OUT.stat().st_size, "bytes,", sum(len(names.split()) for _, names in RULES), "names")


if __name__ == "__main__":
    main()
