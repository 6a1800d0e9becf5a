"""Redaction of secrets and of terminal control characters in autoprof's output.

A secret is recognized in three ways:

* by its form, such as a token of a known service or a webhook
* by a short option of a command before it, as in `mysql -pSECRET`
* by a name before it, as in `token=SECRET` (`named_secrets`)
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from autoprof.base import named_secrets
from autoprof.base.named_secrets import (
    COOKIE,
    HIDDEN,
    LOGIN,
    NONE,
    PASSWORD,
    RANDOM,
    SURE,
    certainty_of,
    closing,
    compiled,
    is_name,
    is_option,
    is_secret,
    kind,
    value_at,
)

_WORD = r"[A-Za-z0-9]"  # letters and digits
_BASE64 = r"[\w-]"  # base64 as in URLs
_HEX = r"[0-9a-fA-F]"
# A slash of a path, which JSON and URLs may escape, and the rest of a path after a slash.
_SLASH = r"(?:\\{0,3}/|%2[Ff])"
_PART = r"[\w@%+-]+"
_PATH = _PART + f"(?:{_SLASH}{_PART})?" * 7
_PORT = r"(?::\d{1,5})?"

# Prefixes of secrets, and the expression for the rest of the secret. No letter or digit may precede the prefix.
_PREFIXED: list[tuple[str, str]] = [
    # Models: hubs, APIs, tracking of experiments, sandboxes.
    ("hf_ api_org_", _WORD + "{16,}"),  # Hugging Face
    ("sk-", _BASE64 + "{16,}"),  # OpenAI, Anthropic, OpenRouter, DeepSeek, Moonshot, Langfuse
    ("gsk_", _WORD + "{20,}"),  # Groq
    ("csk-", _WORD + "{20,}"),  # Cerebras
    ("r8_", _BASE64 + "{30,}"),  # Replicate
    ("pplx-", _WORD + "{20,}"),  # Perplexity
    ("fw_", r"(?=[A-Za-z]{0,40}\d)" + _WORD + "{20,}"),  # Fireworks
    ("tvly-", _BASE64 + "{16,}"),  # Tavily
    ("xai-", _BASE64 + "{30,}"),  # xAI
    ("nvapi-", _BASE64 + "{16,}"),  # NVIDIA
    ("tgp_v1_", _BASE64 + "{16,}"),  # Together
    ("lsv2_pt_ lsv2_sk_", r"\w{20,}"),  # LangSmith
    ("pcsk_", r"\w{30,}"),  # Pinecone
    ("jina_", _WORD + "{32,}"),  # Jina
    ("e2b_", _HEX + "{32,}"),  # E2B
    ("fc-", _HEX + "{32}"),  # Firecrawl
    ("wandb_v1_", r"\w{16,}"),  # W&B
    ("local-", _HEX + "{40}"),  # W&B's own servers
    ("eyJhcGlf", r"[\w+/-]{16,}={0,2}"),  # Neptune: base64 of {"api_...
    ("ak- as-", r"(?=[A-Za-z]{0,22}\d)" + _WORD + "{22}"),  # Modal
    ("rpa_", _WORD + "{30,}"),  # RunPod
    ("dapi", _HEX + r"{32}(?:-\d)?"),  # Databricks
    ("pnu_", _WORD + "{30,}"),  # Prefect
    ("ms-", _HEX + r"{8}-[\w-]{27}"),  # ModelScope
    # Clouds.
    ("AKIA ASIA ABIA ACCA", "[0-9A-Z]{16}"),  # AWS
    ("ABSK", r"[\w+/]{60,}={0,2}"),  # AWS Bedrock
    ("bedrock-api-key-", r"[\w+/]{16,}={0,2}"),
    ("LTAI", _WORD + "{12,}"),  # Alibaba
    ("AKID", _WORD + "{28,}"),  # Tencent
    ("AKLT", _BASE64 + "{28,}"),  # Volcano Engine
    ("AIza", _BASE64 + "{30,}"),  # Google API key
    ("ya29.", _BASE64 + r"{16,}[\w.-]*"),  # Google OAuth access token
    ("1//0", _BASE64 + "{30,}"),  # Google OAuth refresh token
    ("GOCSPX-", _BASE64 + "{16,}"),  # Google OAuth client
    ("dop_v1_ doo_v1_ dor_v1_", _HEX + "{32,}"),  # DigitalOcean
    ("hvs. hvb. hvr.", _BASE64 + "{16,}"),  # Vault
    ("s.", r"(?=[A-Za-z]{0,24}\d)" + _WORD + r"{24}(?![\w.])"),  # Vault before 1.10
    ("HRKU-", _BASE64 + "{30,}"),  # Heroku
    ("fo1_ fm1r_ fm1a_ fm2_", r"[\w+/-]{40,}={0,2}"),  # Fly
    ("tskey-", _BASE64 + "{16,}"),  # Tailscale
    ("sha256~", _BASE64 + "{30,}"),  # OpenShift
    ("ops_eyJ", r"[\w+/]{40,}={0,2}"),  # 1Password
    ("AGE-SECRET-KEY-1", _WORD + "{30,}"),  # age
    ("dp.pt. dp.st. dp.ct. dp.sa.", r"[\w.]{20,}"),  # Doppler
    ("pul-", _HEX + "{40}"),  # Pulumi
    # Code, packages, images.
    ("ghp_ gho_ ghu_ ghs_ ghr_", r"\w{16,}"),  # GitHub
    ("github_pat_", r"\w{16,}"),
    ("glpat- gldt- glrt- glft- glsoat- glptt- glcbt- glimt- gloas- glagent- glffct-", r"[\w.-]{16,}"),  # GitLab
    ("GR1348941", _BASE64 + "{16,}"),
    ("ATATT3 ATCTT3", r"[\w=-]{20,}"),  # Atlassian
    ("ATBB", _WORD + "{24,}"),  # Bitbucket
    ("dckr_pat_ dckr_oat_", _BASE64 + "{16,}"),  # Docker Hub
    ("npm_", _WORD + "{16,}"),
    ("pypi-", r"Ag[\w-]{16,}"),  # base64 of a macaroon
    ("rubygems_", _HEX + "{32,}"),
    ("AKCp", _WORD + "{40,}"),  # Artifactory
    ("cmVmd", _WORD + "{40,}"),
    # Chat, mail, payment, monitoring.
    ("xoxb- xoxp- xoxa- xoxe- xoxo- xoxr- xoxs- xoxe.", r"[\w.-]{10,}"),  # Slack
    ("xapp-", _BASE64 + "{16,}"),
    ("sk_live_ sk_test_ rk_live_ rk_test_ whsec_", _WORD + "{10,}"),  # Stripe
    ("SG.", _BASE64 + r"{16,}\.[\w-]{16,}"),  # SendGrid
    ("SK", "[0-9a-f]{32}"),  # Twilio
    ("key-", _HEX + "{32}"),  # Mailgun
    ("xkeysib-", r"[\w-]{32,}"),  # Brevo
    ("glc_", r"[\w+/]{32,}={0,2}"),  # Grafana
    ("glsa_", _WORD + r"{20,}_\w{8}"),
    ("sntrys_ sntryu_", r"[\w+/=]{32,}"),  # Sentry
    ("NRAK- NRII- NRJS-", r"[A-Za-z0-9-]{19,}"),  # New Relic
    ("lin_api_", _WORD + "{20,}"),  # Linear
    ("ntn_", _WORD + "{30,}"),  # Notion
    ("PMAK-", _HEX + "{24}-" + _HEX + "{30,}"),  # Postman
    ("sbp_", _HEX + "{40}"),  # Supabase
    ("phx_", r"\w{40,}"),  # PostHog
    ("pscale_tkn_ pscale_pw_ pscale_oauth_", r"[\w=.-]{30,}"),  # PlanetScale
    ("shpat_ shpca_ shppa_ shpss_", _HEX + "{32}"),  # Shopify
    ("sq0atp- sq0csp-", _BASE64 + "{22,}"),  # Square
]
# A part of the secret, and the expression for the whole secret. If the expression has a group, the text of the group
# stays visible, such as the address of a webhook.
_OTHERS: list[tuple[str, str]] = [
    (
        "-----BEGIN",
        r"(?s)-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY[ A-Z]{0,9}-----.*?(?:-----END [A-Z0-9 ]{0,60}-----|\Z)",
    ),
    # The user and the password of a URL. Some passwords contain `/`; after a port it begins a path.
    (
        "://",
        r"""(?<=://)(?:[^/\s"'<>]+|[^/\s"'<>:@]*:(?!\d{1,5}(?:[^\w+=@]|\Z))[^\s"'<>@:]+)(?=@)""",
    ),
    ("netloc", r"""(netloc=["'])[^@\s"']+(?=@)"""),  # a parsed URL
    # Webhooks by host, and by path: urllib3's errors show the path without its host.
    ("hooks.slack", rf"(hooks\.slack(?:-gov)?\.com{_PORT}{_SLASH}(?:services|workflows|triggers){_SLASH}){_PATH}"),
    ("services", rf"(services{_SLASH})T[A-Z0-9]+{_SLASH}B[A-Z0-9]+{_SLASH}\w+"),
    ("workflows", rf"(workflows{_SLASH})[TE][A-Z0-9]+{_SLASH}A[A-Z0-9]+{_SLASH}\d+{_SLASH}\w+"),
    ("triggers", rf"(triggers{_SLASH})[TE][A-Z0-9]+{_SLASH}\d+{_SLASH}\w+"),
    ("discord", rf"(discord(?:app)?\.com{_PORT}{_SLASH}api{_SLASH}(?:v\d\d?{_SLASH})?webhooks{_SLASH}){_PATH}"),
    ("webhooks", rf"(webhooks{_SLASH})\d{{5,}}{_SLASH}[\w-]{{16,}}"),
    ("interactions", rf"(interactions{_SLASH})\d{{5,}}{_SLASH}[\w-]{{16,}}"),
    ("office.com", rf"(\.office\.com{_PORT}{_SLASH}webhook{_SLASH}){_PATH}"),
    ("webhookb2", rf"(webhookb2{_SLASH}){_PATH}"),
    ("IncomingWebhook", rf"(webhook{_SLASH})[\w-]+(?:@|%40){_PATH}"),
    ("hook", rf"(bot{_SLASH}(?:v\d{_SLASH})?hook{_SLASH})[\w-]+"),  # Feishu, Lark
    ("trigger-webhook", rf"(trigger-webhook{_SLASH})[\w-]+"),
    ("Q~", r"(?<![\w~.-])[\w~.-]{3}\dQ~[\w~.-]{31,34}\w*"),  # Azure AD
    (".atlasv1.", r"(?<![A-Za-z0-9])[A-Za-z0-9]{14}\.atlasv1\.[\w=-]{30,}"),  # Terraform
    (":AA", r"(?<!\d)\d{8,10}:AA[\w-]{32,}"),  # Telegram
    ("bot", r"((?:/|%2[Ff])bot)\d{5,16}(?::|%3[Aa])[\w-]{30,}"),
    (".", r"(?<![A-Za-z0-9])[MNO][\w-]{23,27}\.[\w-]{6}\.[\w-]{27,}"),  # Discord
]
# Dict from a part that each secret of a format contains to the expression that finds the secret. The expression matches
# the whole word.
_FORMATS: dict[str, str] = {
    **dict(_OTHERS),
    **{
        prefix: rf"(?<![A-Za-z0-9]){prefix.replace('.', chr(92) + '.')}{tail}\w*"
        for prefixes, tail in _PREFIXED
        for prefix in prefixes.split()
    },
}
# JSON web tokens. A word that only begins like a token is matched, too, so that the search skips the whole word.
_JWT = r"\beyJ(?:[\w-]{8,}\.[\w-]{8,}\.[\w-]*(?P<whole>)|[\w-]*)"
_BEARER = r"(?i)\b(bearer|basic)([ \t]+)([\w.~+/=-]{8,})"
_ARGUMENT = r"[\w.+~/@-]+"
_RUNS_SCRIPT = r"-[a-z]{0,4}c"
_URL = re.compile(r"[a-z][a-z0-9+.-]*(::[a-z][a-z0-9+.-]*)*://\S*", re.IGNORECASE)
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_BEHIND_URLS = " \t\n\r\v\f\"'<>"
_BETWEEN_WORDS = " \t\n\r,;&\"'{}()[]"
# Maximum number of characters searched and kept: an error may hold a whole tensor, a command a whole file.
_MAX_CHARS = 1 << 15
# Maximum number of additional searches of a text with a secret. If the quotes in a text are unbalanced, the search for
# one secret may miss another secret.
_MAX_REPEATS = 3

# For each program, a dict from option to the certainty that the value of the option is a secret. A `*` at the end of a
# program's name stands for any characters.
# `login` is a command of docker, podman, helm, oc and others.
_OPTIONS = {
    "curl": {"-u": LOGIN, "-U": LOGIN, "--user": LOGIN, "--proxy-user": LOGIN, "-b": COOKIE},
    "login": {"-p": PASSWORD},
    "sshpass": {"-p": PASSWORD},
    "redis-cli": {"-a": PASSWORD},
    "mysql*": {"-p": PASSWORD},
    "mariadb*": {"-p": PASSWORD},
    "mongo*": {"-p": PASSWORD},
    "ldap*": {"-w": PASSWORD},
}
# In these programs, the word after `-p` is not the password.
_JOINED = ("mysql", "mariadb")
# This command takes a key without an option.
_WANDB_LOGIN = "wandb login"
_NAMES = "|".join(name.replace("*", "[a-z_]*") for name in _OPTIONS)
# Words of shell commands, and of lists in JSON or Python. The quotes around the words may be escaped.
_PROGRAM = rf"""(?<![\w.+-])({_NAMES})(?=[ \t]|\\{{0,3}}["'],)"""
_OPTION = r"""(?<=[\s"'])--?[^\s"',=\\-][^\s"',=\\]*"""
_SHELL_WORD = r"""(?<=[\s"'])[^\s"',\\-][^\s"',\\]*"""
_SEPARATOR = r"""\\{0,3}["']?,?[ \t]+(?:\\\r?\n[ \t]*)?|\\{0,3}["'],|="""
_VALUE = r"""[^\s"']+"""
_BEFORE = 16  # Number of characters searched for the word before `login`.
_ENDS = ("\n", " | ", " && ", " || ")
# Options of curl without a value. They may precede another option in the same word, as in `-sSu`.
_CURL_FLAGS = frozenset("sSkLfgivIjJlnNOqRaB#0123456")


def redacted(command: Sequence[str]) -> str:
    """Return a command line without its secrets, quoted for a shell.

    Bytes of an argument that are not UTF-8 become escapes, because the files of a run contain only UTF-8.
    """
    words: list[str] = []
    certainty, program, previous_argument = NONE, "", ""
    room = _MAX_CHARS
    for i, argument in enumerate(command):
        if room <= 0:
            return writable(f"{shlex.join(words)} ... ({len(command) - i} more arguments)")
        part = argument[: room + 1]
        redacted_part, certainty = _mask_argument(part, previous_argument, program, certainty)
        words.append(hidden(argument if redacted_part is part else redacted_part, room))
        program = _program_of(part, previous_argument) or program
        previous_argument = part
        room -= len(argument) + 1
    return writable(shlex.join(words))


def _mask_argument(argument: str, previous_argument: str, program: str, certainty: int) -> tuple[str, int]:
    """Return an argument without its secret, and the certainty that the next argument is a secret.

    Args:
        argument: An argument of a command.
        previous_argument: The argument before `argument`.
        program: The program that an earlier argument names, if short options of the program may have secrets.
        certainty: The certainty that this argument is a secret.
    """
    if program == _WANDB_LOGIN and not argument.startswith("-"):
        certainty = SURE
    if _is_value(argument, certainty):
        return HIDDEN, RANDOM
    short, length = _short_option(program, argument)
    if short != NONE and length < len(argument):
        return (f"{argument[:length]}{HIDDEN}" if is_secret(short, argument[length:]) else argument), NONE
    if short != NONE:
        return argument, short if not program.startswith(_JOINED) else NONE
    name, equals, value = argument.partition("=")
    is_script = name.isidentifier() and compiled(_RUNS_SCRIPT).fullmatch(previous_argument)
    if equals and not is_script and _holds_secret(name, value):
        return f"{name}={HIDDEN}", NONE
    return argument, NONE if equals else _certainty_of_next_argument(name, previous_argument)


def _is_value(argument: str, certainty: int) -> bool:
    """Return True if an argument is a secret. `certainty` comes from the previous argument, such as `--token`."""
    assigned = argument.partition("=")[2].strip("=") and certainty == RANDOM
    return not is_option(argument) and not assigned and _any_secret(certainty, argument)


def _holds_secret(name: str, value: str) -> bool:
    """Return True if the value of an argument `name=value` is a secret, or has a secret between commas."""
    named = compiled(_ARGUMENT).fullmatch(name) is not None
    return named and value[:1] not in ("[", "(", "{") and _any_secret(certainty_of(name), value)


def _any_secret(certainty: int, value: str) -> bool:
    return any(is_secret(certainty, part.strip("\"'")) for part in value.split(","))


def _certainty_of_next_argument(argument: str, previous_argument: str) -> int:
    """Return the certainty that the next argument of a command is a secret."""
    certainty = certainty_of(argument, previous_argument) if compiled(_ARGUMENT).fullmatch(argument) else NONE
    return certainty if argument.startswith("-") or certainty == NONE else RANDOM


def hidden(text: str, max_chars: int = _MAX_CHARS) -> str:
    """Return a text, such as an error message, without its secrets. Cut the text after `max_chars` characters."""
    beginning = text if len(text) <= max_chars else _without_cut_end(text[:max_chars])
    result, previous_result = _mask_once(beginning), beginning
    for _ in range(_MAX_REPEATS):
        if result == previous_result:
            break
        result, previous_result = _mask_once(result), result
    return result if beginning is text else f"{result}... ({len(text) - len(beginning)} more characters)"


def _mask_once(text: str) -> str:
    """Search a text once. Return the text without the secrets that the search finds."""
    for part, pattern in _FORMATS.items():
        if part in text:
            text = compiled(pattern).sub(lambda match: f"{match[1] if match.lastindex else ''}{HIDDEN}", text)
    if "eyJ" in text:
        text = compiled(_JWT).sub(lambda match: match[0] if match["whole"] is None else HIDDEN, text)
    text = compiled(_BEARER).sub(_mask_bearer, text)
    text = _mask_places(_option_places(text), text)
    return _mask_places(named_secrets.places(text), text)


def _mask_bearer(match: re.Match[str]) -> str:
    return match[0] if is_name(match[3]) else f"{match[1]}{match[2]}{HIDDEN}"


def _mask_places(places: Iterator[tuple[int, int]], text: str) -> str:
    pieces: list[str] = []
    end = 0
    for start, stop in places:
        pieces += text[end:start], HIDDEN
        end = stop
    return "".join([*pieces, text[end:]])


def _without_cut_end(text: str) -> str:
    """Return a text, which was cut, without its last word and without a URL at its end.

    They may be the beginning of a secret, which may not look like a secret without its end.
    """
    text = _without_last_word(text)
    url = text.find("://", max(map(text.rfind, _BEHIND_URLS)) + 1)
    return text if url < 0 else _without_last_word(text[:url])


def _without_last_word(text: str) -> str:
    end = len(text)
    # An apostrophe after a letter may belong to the word: `it's`.
    while end and (text[end - 1] not in _BETWEEN_WORDS or (text[end - 1] == "'" and text[end - 2 : end - 1].isalnum())):
        end -= 1
    return text[:end]


def hidden_in(content: Any, name: str = "") -> Any:
    """Return the content of a JSON file without its secrets. `name` is the name of the content in its object."""
    if isinstance(content, str):
        return HIDDEN if is_secret(kind(name), content) else hidden(content)
    if isinstance(content, dict):
        return {key: hidden_in(value, str(key)) for key, value in content.items()}
    return [hidden_in(value) for value in content] if isinstance(content, (list, tuple)) else content


def is_url(text: str) -> bool:
    """Return True if a text looks like a URL, or like a chained URL of fsspec (`simplecache::s3://...`)."""
    return _URL.fullmatch(text) is not None


def url(text: str) -> str:
    """Return a URL without the parts that may be secret: user, password and query."""
    return hidden(re.sub(r"(?<=://)[^/]*@", "", text.partition("?")[0]))


def plain(text: str) -> str:
    """Return a text that is safe for a terminal: control characters and changes of writing direction are escaped."""
    return _CONTROLS.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def writable(text: str) -> str:
    """Return a text that can be encoded as UTF-8. Other characters, from file names or JSON, become escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _program_of(argument: str, before: str = "") -> str:
    """Return the program that an argument names, or an empty text. `before` is the previous argument.

    Only programs whose options may have secrets count.
    """
    name = argument.rpartition("/")[2]
    if name == "login" and before.rpartition("/")[2] == "wandb":
        return _WANDB_LOGIN
    return name if compiled(_NAMES).fullmatch(name) else ""


def _short_option(program: str, argument: str) -> tuple[int, int]:
    """Return the certainty that the value of an option is a secret, and the length of the option without the value.

    If `argument` is not such an option of `program`, return `NONE` and 0.
    """
    if not program:
        return NONE, 0
    options = next((_OPTIONS[name] for name in _OPTIONS if compiled(name.replace("*", ".*")).fullmatch(program)), {})
    if argument in options:
        return options[argument], len(argument)
    if argument[:2] in options:
        return options[argument[:2]], 2
    last = f"-{argument[-1:]}"
    if program == "curl" and last in options and _CURL_FLAGS.issuperset(argument[1:-1]):
        return options[last], len(argument)
    return NONE, 0


def _option_places(text: str) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each secret in commands, in order. The search takes linear time."""
    match = compiled(_PROGRAM).search(text)
    while match is not None:
        following = compiled(_PROGRAM).search(text, match.end())
        stop = _end_of_command(text, match.end(), following.start() if following else len(text))
        if match[1] == "login" and text[max(0, match.start() - _BEFORE) : match.start()].rstrip(" \t\"',\\").endswith(
            "wandb"
        ):
            words = compiled(_SHELL_WORD).finditer(text, match.end(), stop)
            yield from (word.span() for word in words if is_secret(RANDOM, word[0]))
        else:
            yield from _values(text, match, stop)
        match = following


def _end_of_command(text: str, start: int, stop: int) -> int:
    for end in _ENDS:
        position = text.find(end, start, stop)
        while position > 0 and text[position - 1] == "\\":
            position = text.find(end, position + 1, stop)
        stop = position if position >= 0 else stop
    return stop


def _values(text: str, program: re.Match[str], stop: int) -> Iterator[tuple[int, int]]:
    """Yield the start and the end of each secret in the options of one program."""
    end = program.end()
    for option in compiled(_OPTION).finditer(text, program.end(), stop):
        certainty, length = _short_option(program[1], option[0])
        if certainty == NONE or option.start() < end:
            continue
        start, close = _value(text, option, length, program[1])
        if is_secret(certainty, text[start:close]):
            yield start, close
            end = close


def _value(text: str, option: re.Match[str], length: int, program: str) -> tuple[int, int]:
    """Return the start and the end of an option's value. It is in the same word as the option, or in the next word."""
    position, quote = option.start() + length, text[option.start() - 1]
    if length == len(option[0]) and (separator := compiled(_SEPARATOR).match(text, position)):
        value = value_at(text, separator.end(), _VALUE)
        is_value = separator[0] == "=" or not (program.startswith(_JOINED) or is_option(value.text))
        return (value.start, value.end) if is_value else (position, position)
    if quote in ("'", '"'):
        close = closing(text, quote, position)
        return position, close if close >= 0 else len(text)
    value = value_at(text, position, _VALUE)
    return value.start, value.end
