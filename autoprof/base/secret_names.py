"""Rules for names and values: which name makes its value a secret, and which values are never secret."""

from __future__ import annotations

import re

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
_VARIABLE = r"\$[A-Z_][A-Z0-9_]*|\$?\{.*|\$\(.*|<.*|%\w+%|\[\w+\]"
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
        certainty = _announced(word, previous_word, qualified)
        # `token_entropy` and `TokenOutput` are no secrets, `TOKEN_PROD` is one.
        is_followed = word == "token" and not qualified and place + 1 < len(words)
        result = max(result, min(certainty, MAYBE) if is_followed else certainty)
        qualified = qualified or word in _QUALIFIERS
        previous_word = word
    return SURE if result == PASSWORD and not _is_password(previous_word) else result


def _announced(word: str, previous_word: str, qualified: bool) -> int:
    """Return the certainty that one word of a name gives for the value.

    Args:
        word: The word.
        previous_word: The word before `word` in the name.
        qualified: True if an earlier word of the name makes the value of `key` a secret.
    """
    if previous_word in _HARMLESS_BEFORE.get(word, ()):
        return NONE
    if _is_password(word):
        return PASSWORD
    if word == "token" and previous_word in _DOUBTFUL:
        return RANDOM
    if word in _SURE or (qualified and word in ("key", "keys", "tokens")):
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
    is_placeholder = re.fullmatch(_VARIABLE, password) or password.startswith("//")
    return bool(user and password.strip("/0123456789")) and not is_placeholder


def _is_login(value: str) -> bool:
    """Return True if a value is `user:password`, or if the user or the password is replaced by a token."""
    user, _, password = value.partition(":")
    return looks_random(user) or bool(password and not re.fullmatch(_VARIABLE, password))


def is_option(word: str) -> bool:
    """Return True if the word after an option is another option, not a value, as `--lr` in `--use_auth_token --lr`."""
    name = word.lstrip("-")
    if name == word:
        return False
    return "=" in name.rstrip("=") or not is_secret(RANDOM if word.startswith("--") else MAYBE, name)


def has_words_of_tokenizers(text: str) -> bool:
    """Return True if a text has a word about tokenizers. A `token` near such a word is a token of a text."""
    return "has no id" in text or not _NEAR_TOKENS.isdisjoint(re.findall(r"\w+", text.lower()))


def _is_harmless(value: str) -> bool:
    """Return True if a value is a common word, a placeholder, an expression, a file, a path or a URL."""
    word = value.lower().strip("'\"`.:!?*-")
    if word in _STATES or word.endswith("n't") or re.fullmatch("(it|that|you|they|we|i)'[a-z]+", word):
        return True
    if re.fullmatch(_VARIABLE, value) or re.fullmatch(_CODE, value) or re.fullmatch(_FILE, value):
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
    """Return True if a value consists of words, as names in programs do."""
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
