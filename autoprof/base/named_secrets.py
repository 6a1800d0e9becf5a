"""Secrets that come after a name, such as `token=...`: the names, the values, and the search in texts of any kind.

The name gives a certainty that its value is a secret (`kind`), and the value decides (`is_secret`). Texts are messages,
JSON, YAML, reprs, command lines, headers and URLs, also nested in each other. The search takes linear time, because it
skips each secret that it finds and reads at most a few hundred characters of other values.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

# Certainty that a value is a secret. NONE: it is not. RANDOM: only if the value looks random. MAYBE: unless the value
# looks like a name or a sentence. SURE and PASSWORD: with few exceptions. PAIR and LOGIN: if the value is
# `user:password`; with PAIR, two numbers are no secret. COOKIE: if the value is `name=value`.
NONE, RANDOM, MAYBE, SURE, PASSWORD, PAIR, LOGIN, COOKIE = range(8)

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_PASSWORDS = _words(
    "password passwords passwd passphrase passcode pwd sshpass dbpass userpass bindpass rootpass adminpass bindpw "
    "rootpw adminpw userpw dbpw ldappw"
)
_SURE = _words(
    "secret secrets credential credentials cred creds authorization cookie cookies token pass jwt apikey "
    "apikeys authtoken bearer hmac pw"
)
# Endings of compound words such as `hftoken` and `openaiapikey`.
_FUSED = ("token", "secret", "pwd", "apikey", "accesskey", "secretkey", "privatekey", "authkey")
_NO_KEYS = _words("monkey hotkey turkey donkey hockey")
_MAYBE = _words("tokens pat auth oauth sig signature signatures")
# After these words, the value of `key`, `keys` or `tokens` is a secret.
_QUALIFIERS = _words(
    "access account admin anthropic api auth azure bearer encryption hf hmac hub huggingface github gitlab license "
    "master openai openrouter private refresh secret security signing ssh subscription wandb"
)
# After these words, `token` means a token of a text, or a number of such tokens.
_TOKENIZER = _words(
    "decoded matched mismatched accepted candidate offending "
    "pad padding eos bos unk sep cls mask masked image video audio vision speech text think thinking reasoning tool "
    "special stop start end begin beginning first last next previous prev current new old response prompt input output "
    "generated gen chosen rejected sampled target draft bonus max min num n total per avg average mean sum count loss "
    "reward score entropy dp sp each every any this single forced forward decode decoder encoder prefill suppress "
    "language lang task boundary placeholder extra additional added unexpected unknown expected illegal syntax im eot "
    "eod eom eoc boi eoi prefix suffix middle fim action state observation assistant system cached cache kv "
    "all newline space blank byte sub word head object box ref point latent register pooling"
)
# After these words, `token` may mean a token of a text, or a secret.
_DOUBTFUL = _words("bad wrong")
# Near these words, `token` means a token of a text.
_NEAR_TOKENS = _words(
    "tokenizer tokenizers detokenizer vocab vocabulary logprob logprobs top_logprobs token_id token_ids unk_token "
    "cumulative_logprob decoded"
)
# After these words, `key` means a column or an index.
_DATA = _words(
    "prompt response image images video videos audio input inputs output outputs label labels reward fn data dataset "
    "source answer question message messages chat text tools target sort order group primary foreign partition shard "
    "cache dict state hash lookup index config unique metric score solution reference ref query attention row column "
    "field feature json enable thinking teacher chosen rejected id ids kv public unexpected missing unknown duplicate "
    "extra full hot"
)
_PASSES = _words(
    "forward backward fwd bwd first second third last single one two multi n num each per prefill decode optimizer "
    "compiler fusion"
)
_HARMLESS_BEFORE = {"token": _TOKENIZER, "tokens": _TOKENIZER, "key": _DATA, "keys": _DATA, "pass": _PASSES}
# After `token`, `key` and similar words, these words mean a property of a secret: its place, its kind, its size.
_ABOUT = _words(
    "file filename path dir folder directory name names url uri endpoint host port type types mode method scheme "
    "format provider policy length len lens size sizes bits bytes count counts num limit budget threshold max min "
    "ttl timeout expiry expires expiration rotation env var vars header field column prefix suffix enabled "
    "required disabled error errors level mean sum avg rate ratio loss reward rewards mask masks index idx pos "
    "position positions ids prob probs logprob logprobs logits embedding embeddings embed dim dims head heads "
    "states layer proj norm bias weight weights scale padding mapping map func fn merge strategy start end seen "
    "skip usage per acc accuracy at config sock socket chain ring board"
)
_STATES = _words(
    "true false yes no on off none null nil undefined auto default empty unset missing required optional invalid valid "
    "expired set not enabled disabled unknown redacted hidden secure str int bytes float bool any dict list tuple "
    "object string secretstr nonetype union callable lambda run please use see check try the a an you your this that "
    "it are was were is be must should could cannot can may has have expected got given from for with without and or "
    "to in of at by end await ok masked"
    " removed filtered option argument flag parameter value bearer basic digest"
    " md5 sha1 sha224 sha256 sha384 sha512 blake2b blake2s"
)
# `re` compiles these expressions at their first use. The values are short (`_LONG`).
_NUMBER = r"(?i)[-+]?(\d[\d_]*(\.\d*)?|\.\d+)(e[-+]?\d+)?(%|x|[kmgtb]|[kmgt]i?b|n?s|[mu]s|min|h|it/s|tokens?)?"
_PLACEHOLDER = r"\$[A-Z_][A-Z0-9_]*|\$?\{.*|\$\(.*|<.*|%\w+%|\[\w+\]"
_CODE = r"(os|args|self|cls|config|cfg|settings|kwargs|params|opts?)\.[A-Za-z_][\w.]*"
_PATH = r"(~|\.{1,2})?[/\\]|[A-Za-z]:\\|[A-Za-z][A-Za-z0-9+.-]{0,30}://"
_FILE = (
    r"(?i)[^:=]*\.(txt|jsonl?|ya?ml|toml|ini|cfg|conf|env|pem|key|crt|cer|pub|p12|pfx|py|sh|csv|parquet|safetensors|pt)"
    r"|id_(rsa|dsa|ecdsa|ed25519)(\.pub)?"
)
# Names that consist of words: `extra_info.answer`, `score_v2`, `torch.float32`, `model.layers.12.mlp`.
_NAME = r"[_.]*([A-Za-z]+\d{0,2}|\d{1,5})([_.]+([A-Za-z]+\d{0,2}|\d{1,5}))*[_.]*"
_CONSTANT = r"[A-Z0-9]+(_[A-Z0-9]+)*_(KEY|TOKEN|SECRET|PASSWORD)S?"
_UUID = r"(?i)[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_CHANGE = r"(?<=[A-Za-z])(?=\d)|(?<=\d)(?=[A-Za-z])"
_HUMP = r"[a-z](?=[A-Z])"
# Longer values are not compared with regular expressions.
_LONG = 300
# Minimum length of a secret whose name is doubtful. Minimum number of letters and digits in a row in a random value.
_MIN_CHARS, _MIN_RANDOM_CHARS = 6, 12

HIDDEN = "***"

# A name, and the separator before its value: `=`, `:`, a comma after a quote, or a space (options, sentences).
_NAMED = (
    r"""(?<![\w.+-])(?P<name>[\w.+-]+)(?![\w.+-])(?:[ ](?:provided|supplied|given|specified|used|value|is|was))?"""
    r"""(?P<close>[\\"'`)\]]{0,12})"""
    r"""(?:[ \t]*(?P<is>:=|=>|==?|:|>|%3[Dd])[ \t]*(?:\r?\n[ \t]+)?|(?P<comma>[ \t]*,\s*)|(?P<gap>\s+))"""
)
# The part between name and value in `name: HF_TOKEN, value: x`.
_PAIRED = r"""["']?[Vv]alue["']?[ \t]*[:=][ \t]*"""
_PAIR_OPENS = r"""[\[(]\s?[bru]{0,2}\\{0,8}["']\Z"""
_NOT_A_VALUE = r"""["']?[=:]"""
_SCHEME = r"""(?i)["']?(?:bearer|basic)[ \t]+(?=[\w*])"""
_ANY_SCHEME = r"""["']?[A-Za-z][A-Za-z-]{2,20}[ \t]+(?=[\w*])"""
# A quote, which may be escaped, and a value without quotes.
_QUOTE = r"""[bBfFrRuU]{0,2}(\\{0,8}["'`])"""
_BARE = r"""\*{3}(?![\w*])|<[^<>\n]{0,80}>|[^\s,;&"'`{}()\[\]]+"""
_TAIL = r"""[\w*][^\s,;&"'`{}()\[\]]*"""
_LINE = r"""\w[^\r\n"'`]*"""  # of cookies
_XML = r"""[^\s,;&"'`{}()\[\]<]+"""
_IN_BRACKETS = r"[\[({][^\[\](){}]*"
_ELEMENT = r"""[bBuUrR]?(?:"(?P<double>[^"]*)(?:"|\Z)|'(?P<single>[^']*)(?:'|\Z))|[^\s,;&"']+"""
_NEXT = r",|\s+"
_ASSIGNED = r"[\w.+-]*[=:][^=]"
# A shell's script in quotes: an assignment in it ends at the next space.
_SCRIPT = r"""(?:(?<![\w-])-[a-z]{0,4}c["']?,?[ \t]+|\bCommand )["']{1,2}\Z"""
_VARIABLE = r"[A-Za-z_]\w*"
_TO_NEXT_OPTION = r"[^\r\n]*?(?=[ \t]--?[A-Za-z]|[\r\n]|\Z)"
# Quotes inside single quotes, as `shlex.quote` and people write them, and the end of `it's`.
_QUOTES_INSIDE = ("'\"'\"'", "'\\''")
_CONTRACTED = r"'(?:s|t|d|m|re|ve|ll)(?![\w'\"=:,)\]}])"
_BEFORE = 24  # Number of characters searched for the word before a name.
_NEAR = 60  # Number of characters searched for words of tokenizers.
_FIELD = 400  # Number of characters searched for the field of a validation error.


class Value(NamedTuple):
    """A value in a text.

    Attributes:
        start: Index of the value's first character, after the opening quote.
        end: Index after the value's last character, before the closing quote.
        stop: Index after the closing quote.
        text: The characters of the value.
        quoted: True if the value is in quotes.
        closed: False if the closing quote is missing, because the text was cut.
    """

    start: int
    end: int
    stop: int
    text: str
    quoted: bool = False
    closed: bool = True


@functools.cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a regular expression at its first use: most processes need only a few of the expressions."""
    return re.compile(pattern)


def places(text: str) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each secret in `text`, in order."""
    end = position = 0
    while (match := compiled(_NAMED).search(text, position)) is not None:
        position = match.end()
        for start, stop in _secrets_after_name(text, match, end):
            yield start, stop
            end = position = stop


def certainty_of(name: str, before: str = "") -> int:
    """Return the certainty that the value of an option or name is a secret. `before` is the word before the name."""
    if name in ("-u", "--user", "--proxy-user"):
        return PAIR
    if name == "login":
        return RANDOM
    return kind(name, "" if name.startswith("-") else before.lower())


def _secrets_after_name(text: str, match: re.Match[str], searched_to: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each secret after one name.

    Args:
        text: Text that may contain secrets.
        match: The match of the name.
        searched_to: Index of `text`. An earlier call has found the secrets before it.
    """
    name, start, position = match["name"], match.start(), match.end()
    if text[start - 1 : start] == "\\" and name[0] in "nrt":
        name = name[1:]  # an escaped end of a line
    is_header = match[0].lower().startswith("header value")  # in errors of HTTP libraries
    certainty = SURE if is_header else certainty_of(name, _word_before(text[max(searched_to, start - _BEFORE) : start]))
    if field := _certainty_of_field_value(text, match):
        yield from _secrets(text, position, match, field)
        return
    if certainty == NONE:
        return
    if paired := None if match["is"] else compiled(_PAIRED).match(text, position):
        position = paired.end()
    else:
        certainty = _certainty_in_context(text, match, certainty)
    if certainty != NONE:
        yield from _secrets(text, position, match, certainty)


def _certainty_of_field_value(text: str, match: re.Match[str]) -> int:
    """Return the certainty that the value in a validation error is a secret.

    These errors name the field in another place than directly before the value.
    """
    name, start, position = match["name"], match.start(), match.end()
    field = ""
    if name == "input_value" and match["is"]:  # pydantic: on the last line without an indent
        lines = text[max(0, start - _FIELD) : start].replace("\\n", "\n").split("\n")[start > _FIELD : -1]
        field = next((line for line in reversed(lines) if line[:1] not in ("", " ")), "")
    elif name == "input" and match["close"] and match["is"]:  # pydantic: its list of errors
        _, separator, location = text[max(0, start - _FIELD) : start].rpartition("loc")
        field = location.partition("msg")[0] if separator else ""
    elif name == "Value" and match["gap"]:
        return _certainty_of_omegaconf_value(text, value_at(text, position, _BARE))
    return kind(field) if field else NONE


def _certainty_of_omegaconf_value(text: str, value: Value) -> int:
    """Return the certainty that the value in an error of OmegaConf is a secret.

    The error begins with `Value 'x' of type 'str'` and names the field at its end.
    """
    if not value.quoted or not (text.startswith(" of type ", value.stop) or not value.closed):
        return NONE
    _, separator, field = text[value.stop : value.stop + _FIELD].partition("full_key: ")
    return kind(field.partition("\n")[0]) if separator else SURE  # the field was cut off


def _word_before(text: str) -> str:
    """Return the last word of a text that ends with a space; an empty text if no space follows the last word."""
    return text[:-1].rpartition(" ")[2].strip("\"'`(") if text.endswith(" ") else ""


def _certainty_in_context(text: str, match: re.Match[str], certainty: int) -> int:
    """Return the certainty that a secret follows a name. `certainty` comes from the name without its context."""
    previous_character = text[match.start() - 1 : match.start()]
    if match["comma"]:
        return _certainty_of_list_element(text, match, certainty)
    if match["gap"]:
        return _certainty_after_space(text, match, certainty)
    if match["is"] == ">":
        quote = text[match.start() - 2 : match.start() - 1]
        is_placeholder = quote in ("'", '"', "`") and text.startswith(quote, match.end())  # '<HF_TOKEN>'
        return certainty if previous_character == "<" and not is_placeholder else NONE
    if match["is"] == ":" and previous_character == "/":  # a path and a message about it
        return NONE
    return min(certainty, MAYBE) if match["is"] == "==" else certainty


def _certainty_of_list_element(text: str, match: re.Match[str], certainty: int) -> int:
    """Return the certainty that the list element after an option, or after the name in a pair, is a secret."""
    start, position = match.start(), match.end()
    if match["close"][-1:] not in ("'", '"') or not compiled(_QUOTE).match(text, position):
        return NONE
    if match["name"].startswith("-"):
        return _certainty_after_option(text, position, certainty)
    stop = value_at(text, position, _BARE).stop
    ends = text[stop : stop + 2].lstrip()[:1] in ("", ")", "]")
    is_pair = ends and compiled(_PAIR_OPENS).search(text[max(0, start - 12) : start])
    return certainty if is_pair else min(certainty, MAYBE)


def _certainty_after_space(text: str, match: re.Match[str], certainty: int) -> int:
    """Return the certainty that the word after a name is a secret. The name is an option, or a word of a sentence."""
    name, position = match["name"], match.end()
    if name.startswith("-"):
        return _certainty_after_option(text, position, certainty)
    quoted = compiled(_QUOTE).match(text, position) is not None
    if name.lower() == "header":
        return SURE if quoted else RANDOM
    return MAYBE if quoted and certainty >= SURE and name.lower() != "token" else RANDOM


def _certainty_after_option(text: str, position: int, certainty: int) -> int:
    """Return the certainty that the word after an option is a secret, and not the next option or an operator."""
    dashed = text[position : position + 2].lstrip("\"'").startswith("-")
    no_value = compiled(_NOT_A_VALUE).match(text, position) or (
        dashed and is_option(value_at(text, position, _BARE).text)
    )
    return NONE if no_value else certainty


def _secrets(text: str, position: int, match: re.Match[str], certainty: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each secret in the value that begins at `position`."""
    if brackets := compiled(_IN_BRACKETS).match(text, position):
        yield from _secrets_in_brackets(text, brackets, certainty)
        return
    position = _position_after_scheme(text, position, match["name"], certainty)
    bare = _XML if match["is"] == ">" else _LINE if _is_cookie(text, position, match["name"]) else _BARE
    value = value_at(text, position, bare)
    if text[value.stop : value.stop + 1] in ("(", "[") and is_name(value.text):  # a call: `SecretStr('x')`
        certainty = min(certainty, MAYBE)
        if not compiled(_QUOTE).match(text, value.stop + 1):
            return
        value = value_at(text, value.stop + 1, bare)
    if match["name"].lower() == "token" and _is_of_tokenizer(text, position, value.end):
        certainty = min(certainty, RANDOM)
    end = _end_of_secret(text, match, value)
    if value.text == HIDDEN or _is_secret(text, match, value, end, certainty):
        yield from _secrets_without_quotes(text, match, value, end)


def _is_of_tokenizer(text: str, start: int, end: int) -> bool:
    """Return True if the words around a `token` show that it is a token of a tokenizer, not a credential."""
    words = f"{text[max(0, start - _NEAR) : start]} {text[end : end + _NEAR]}"
    return "has no id" in words or not _NEAR_TOKENS.isdisjoint(re.findall(r"\w+", words.lower()))


def _is_secret(text: str, match: re.Match[str], value: Value, end: int, certainty: int) -> bool:
    """Return True if a value is a secret, alone or together with the text up to `end`, or if the value was cut off."""
    is_sentence = certainty <= MAYBE and " " in value.text
    if not value.closed and certainty != RANDOM and not is_sentence:
        return True
    all_words_are_secret = (
        match["is"] == "=" and match["name"].startswith("-") and is_secret(certainty, text[value.start : end])
    )
    return all_words_are_secret or is_secret(certainty, value.text)


def _secrets_without_quotes(text: str, match: re.Match[str], value: Value, end: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each secret after one name, without quotes: there may be several, as in `x,y`."""
    yield value.start, end
    position = max(end, value.stop)
    if value.quoted and (tail := compiled(_TAIL).match(text, position)):  # for a shell, this is a part of the same word
        yield tail.span()
        position = tail.end()
    yield from _more_secrets(text, position, match["name"].startswith("-"))


def _position_after_scheme(text: str, position: int, name: str, certainty: int) -> int:
    """Return the position of the secret `x` in `Authorization: Bearer x`; without `Bearer`, return `position`."""
    scheme = _ANY_SCHEME if name.lower().endswith("authorization") else _SCHEME
    match = compiled(scheme).match(text, position) if certainty >= SURE else None
    return match.end() if match else position


def _is_cookie(text: str, position: int, name: str) -> bool:
    return name.lower().endswith("cookie") and text[position - 2 : position] == ": "


def value_at(text: str, position: int, bare: str) -> Value:
    """Return the value that begins at index `position`. `bare` is the regular expression for values without quotes."""
    quote = compiled(_QUOTE).match(text, position)
    if quote is None:
        end = _end_of_word(text, position, bare)
        return Value(position, end, end, text[position:end])
    start = quote.end()
    close = closing(text, quote[1], start)
    end = close if close >= 0 else len(text)
    return Value(start, end, end + len(quote[1]), text[start:end], quoted=True, closed=close >= 0)


def _end_of_word(text: str, position: int, bare: str) -> int:
    """Return the end of a value without quotes. A value may contain apostrophes; punctuation at its end is excluded."""
    match = compiled(bare).match(text, position)
    end = match.end() if match else position
    while end > position and text[end : end + 1] == "'" and text[end - 1].isalnum():
        tail = compiled(_TAIL).match(text, end + 1)
        if tail is None:
            break
        end = tail.end()
    return position + len(text[position:end].rstrip(".:!?"))


def closing(text: str, quote: str, position: int) -> int:
    """Return the index of the quote that closes a value, or -1. Escaped quotes and apostrophes do not close a value."""
    close = text.find(quote, position)
    while close >= 0 and (length := _quote_length_in_value(text, quote, close)):
        close = text.find(quote, close + length)
    return close


def _quote_length_in_value(text: str, quote: str, position: int) -> int:
    """Return the length of the quote at `position` if the quote belongs to the value, or 0 if it closes the value."""
    if quote == "'":
        for inside in _QUOTES_INSIDE:
            if text.startswith(inside, position):
                return len(inside)
        if text[position - 1].isalpha() and compiled(_CONTRACTED).match(text, position):
            return 1
    return int(text[position - 1] == "\\" and quote[0] != "\\")


def _end_of_secret(text: str, match: re.Match[str], value: Value) -> int:
    """Return the end of a secret.

    In `'--password=two words'`, the secret ends at the quote that matches the quote before the name. In
    `bash -c 'HF_TOKEN=x python'`, it ends at the space. In `--password=it's x`, it ends at the next option, because
    this is not the syntax of a shell.
    """
    start = match.start()
    previous_character = text[start - 1 : start]
    if value.quoted or not match["is"] or match["close"]:
        return value.end
    if previous_character not in ("'", '"'):
        unquoted = match["is"] == "=" and match["name"].startswith("-") and "'" in value.text
        rest = compiled(_TO_NEXT_OPTION).match(text, value.end) if unquoted else None
        return rest.end() if rest else value.end
    if compiled(_VARIABLE).fullmatch(match["name"]) and compiled(_SCRIPT).search(text[max(0, start - 16) : start]):
        return value.end
    close = closing(text, previous_character, value.end)
    return close if close >= 0 else len(text)


def _secrets_in_brackets(text: str, brackets: re.Match[str], certainty: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each secret in a list, a tuple or a mapping."""
    for element in compiled(_ELEMENT).finditer(text, brackets.start() + 1, brackets.end()):
        if text[element.end() : element.end() + 1] == ":" or element[0].endswith(":"):
            continue
        quoted = "double" if element["double"] else "single" if element["single"] else 0
        element_certainty = certainty if quoted or brackets[0][0] != "(" else min(certainty, MAYBE)
        if is_secret(element_certainty, element[quoted]):
            yield element.span(quoted)


def _more_secrets(text: str, position: int, is_option: bool) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of other secrets after the same name: `y` in `x,y`, or in `x y` after an option."""
    while (between := compiled(_NEXT).match(text, position)) and (is_option or between[0] == ","):
        bare = compiled(_BARE).match(text, between.end())
        if bare is None or not _is_another_secret(bare[0], between[0]):
            return
        yield bare.span()
        position = bare.end()


def _is_another_secret(value: str, between: str) -> bool:
    if value == HIDDEN:
        return True
    return compiled(_ASSIGNED).match(value) is None and is_secret(MAYBE if between == "," else RANDOM, value)


def kind(name: str, before: str = "") -> int:
    """Return the certainty that the value of a name is a secret. `before` is the word before the name in a sentence.

    The words of a name end at `_`, `-`, `.`, digits and capitals. The words `token` and `password` make the value a
    secret, and so does `key` after a word like `api` or `wandb`. If another word or no word is before `key`, the value
    decides (`is_secret`). The value is no secret if the name means a special token, a count or a data column, or the
    file, the kind or the size of a secret.
    """
    words = [word.lower() for word in _WORDS.findall(name)]
    if any(before in word_set for word_set in (_QUALIFIERS, _TOKENIZER, _DATA, _DOUBTFUL)):
        words.insert(0, before)
    property_place = max((place for place, word in enumerate(words) if word in _ABOUT), default=-1)
    qualified = not _QUALIFIERS.isdisjoint(words[: property_place + 1])
    result, previous_word = NONE, words[property_place] if property_place >= 0 else ""
    for place, word in enumerate(words[property_place + 1 :], property_place + 1):
        certainty = _certainty_of_word(word, previous_word, qualified)
        # `token_entropy` and `TokenOutput` are no secrets, `TOKEN_PROD` is one.
        is_followed = word == "token" and not qualified and place + 1 < len(words)
        result = max(result, min(certainty, MAYBE) if is_followed else certainty)
        qualified = qualified or word in _QUALIFIERS
        previous_word = word
    return SURE if result == PASSWORD and not _is_password(previous_word) else result


def _certainty_of_word(word: str, previous_word: str, is_qualified: bool) -> int:
    """Return the certainty that one word of a name gives for the value.

    Args:
        word: A word of the name, in lower case.
        previous_word: The word before `word` in the name.
        is_qualified: True if an earlier word of the name makes the value of `key` a secret.
    """
    if previous_word in _HARMLESS_BEFORE.get(word, ()):
        return NONE
    if _is_password(word):
        return PASSWORD
    if word == "token" and previous_word in _DOUBTFUL:
        return RANDOM
    if word in _SURE or (is_qualified and word in ("key", "keys", "tokens")):
        return SURE
    ending = next((end for end in _FUSED if word.endswith(end)), "")
    if ending:
        return NONE if word.removesuffix(ending) in _TOKENIZER else SURE
    is_key = word.endswith(("key", "keys")) and word.removesuffix("s") not in _NO_KEYS
    return MAYBE if is_key or word in _MAYBE else NONE


def _is_password(word: str) -> bool:
    return word in _PASSWORDS or word.endswith(("password", "passwd"))


def is_secret(certainty: int, value: str) -> bool:
    """Return True if a value is a secret, given the certainty from its name (`kind`).

    Numbers, booleans, paths, URLs, placeholders (`<...>`, `$NAME`) and common words are never secret, except a password
    of digits. With `MAYBE`, sentences and names such as `prompt` and `extra_info.answer` are not secret, either.
    """
    if certainty == NONE or not any(map(str.isalnum, value)):
        return False
    if certainty == RANDOM:
        return _is_random(value)
    if certainty in (PAIR, LOGIN, COOKIE):
        return _is_pair(value) if certainty == PAIR else _is_login(value) if certainty == LOGIN else "=" in value
    if len(value) > _LONG:
        return certainty >= SURE or re.search(r"\s", value) is None
    if re.fullmatch(_NUMBER, value):
        return certainty == PASSWORD and value.isdigit() and len(value) > 3
    # Other secrets than passwords are ASCII. Special tokens of some tokenizers are not.
    if _is_harmless(value) or (certainty != PASSWORD and not value.isascii()):
        return False
    return certainty >= SURE or _may_be_secret(value)


def _is_random(value: str) -> bool:
    """Return True if a word looks random and is not a path."""
    if re.match(_PATH, value) or re.search(r"[\s,;&{}()\[\]]", value):
        return False
    return looks_random(value) or looks_random(re.sub("[-_]", "", value))


def _is_pair(value: str) -> bool:
    """Return True if a value is `user:password`, but not if it is two numbers, or a host and a port."""
    user, _, password = value.partition(":")
    is_placeholder = re.fullmatch(_PLACEHOLDER, password) or password.startswith("//")
    return bool(user and password.strip("/0123456789")) and not is_placeholder


def _is_login(value: str) -> bool:
    """Return True if a value is `user:password`, or if the user or the password is replaced by a token."""
    user, _, password = value.partition(":")
    return looks_random(user) or bool(password and not re.fullmatch(_PLACEHOLDER, password))


def is_option(word: str) -> bool:
    """Return True if the word after an option is another option, not a value, as `--lr` in `--use_auth_token --lr`."""
    name = word.lstrip("-")
    if name == word:
        return False
    return "=" in name.rstrip("=") or not is_secret(RANDOM if word.startswith("--") else MAYBE, name)


def _is_harmless(value: str) -> bool:
    """Return True if a value is a common word, a placeholder, an expression, a file, a path or a URL."""
    word = value.lower().strip("'\"`.:!?*-")
    if word in _STATES or word.endswith("n't") or re.fullmatch("(it|that|you|they|we|i)'[a-z]+", word):
        return True
    if re.fullmatch(_PLACEHOLDER, value) or re.fullmatch(_CODE, value) or re.fullmatch(_FILE, value):
        return True
    return re.match(_PATH, value) is not None and ("://" in value or not looks_random(value))


def _may_be_secret(value: str) -> bool:
    value = value.rstrip(".:!?")
    if len(value) < _MIN_CHARS or re.search(r"[\s*{(]", value):
        return False
    # `openai/gsm8k` is a data set, a model or a file.
    is_common = is_name(value) or (re.fullmatch(r"[\w.-]+(/[\w.-]+)+", value) and not looks_random(value))
    return not is_common or "secret" in value.lower()


def is_name(value: str) -> bool:
    """Return True if a value consists of words, as `load_model` or `MAX_LENGTH` does. Such a value is not hidden."""
    if value.isupper() and len(value) > 3:
        return re.fullmatch(_CONSTANT, value) is not None
    return re.fullmatch(_NAME, value) is not None and not looks_random(value)


def looks_random(value: str) -> bool:
    """Return True if a value looks random: a UUID, or a long word in which letters and digits, or cases, alternate."""
    if re.fullmatch(_UUID, value):
        return True
    longest_word = max(re.findall(r"[A-Za-z0-9]+", value), key=len, default="")
    if len(longest_word) < _MIN_RANDOM_CHARS:
        return False
    return len(re.findall(_CHANGE, longest_word)) >= 3 or len(re.findall(_HUMP, longest_word)) * 5 > len(longest_word)
