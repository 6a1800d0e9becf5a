"""Texts with a secret and similar texts without one, which measure redaction.

Sources: options of verl 0.9, OpenRLHF, TRL, transformers, vLLM 0.27, SGLang, Hydra, curl and docker; token formats of
gitleaks (`config/gitleaks.toml`), detect-secrets (`detect_secrets/plugins/`) and trufflehog (`pkg/detectors/`); error
texts of HTTP clients, model hubs, API providers and databases.

No token here is real. Each is built from parts, so that a scanner of this repository finds none.
"""

from __future__ import annotations

import random
import string
import uuid
from urllib.parse import quote

ARGUMENT, ENVIRONMENT, TOKEN, ERROR = "argument", "environment", "token format", "error text"
WEBHOOK = "webhook"

_random = random.Random(28)
_HEX, _DIGITS, _UPPER, _LOWER = "0123456789abcdef", string.digits, string.ascii_uppercase, string.ascii_lowercase
_ALNUM = string.ascii_letters + _DIGITS
_URL = _ALNUM + "_-"


def _made(alphabet: str, length: int) -> str:
    """Return random characters with at least one digit and one letter, if the alphabet has both."""
    while True:
        text = "".join(_random.choice(alphabet) for _ in range(length))
        kinds = [kind for kind in (_DIGITS, string.ascii_letters) if set(kind) & set(alphabet)]
        if {text[0], text[-1]} <= set(_ALNUM) and all(set(kind) & set(text) for kind in kinds):
            return text


# Secrets as people choose them and as services issue them. Each of them in turn replaces `{}` in the texts below.
VALUES = [
    "hunter2hunter2",
    _made(_HEX, 40),
    _made(_ALNUM, 24),
    str(uuid.UUID(int=_random.getrandbits(128), version=4)),
    f"{_made(_ALNUM, 12)}/{_made(_ALNUM, 14)}+{_made(_ALNUM, 14)}=",
]

# Options of `python train.py ... --lr 1e-6`, those with dots of Hydra, and whole commands. ` | ` separates texts.
_OPTIONS = """
--openai_key={} | --openai-key {} | --key {} | --key={} | --keys={} | -key {} | --api_keys={},{} | --api-keys {} {} |
--pass {} | --pass={} | --db-pass {} | --auth={} | --auth {} | --auth=user:{} | --basic-auth user:{} | --pat {} |
--github-pat={} | --pwd={} | --password {} | --passphrase={} | --password2={} | --secret {} | --client-secret={} |
--credentials={} | --creds {} | --sig={} | --signature {} | --cookie {} | --cookies=session:{} | --token={} |
--hub_token={} | --push_to_hub_token {} | --use_auth_token={} | --hfToken={} | --hfToken2 {} | --apiKey={} |
--apikey {} | --APIKey={} | --openaiapikey={} | --accesstoken={} | --wandb_key {} | --wandb.api_key={} |
--wandb-api-key-prod={} | --judge_api_key {} | --reward.judge.openai_key={} | --api-key1 {} | --subscription-key={} |
--account-key {} | --encryption_key={} | --logger.wandb.key {} |
"--config={{\\"openai_key\\": \\"{}\\", \\"lr\\": 1}}" |
"--password=two words {}" | --proxy=http://user:{}@host:3128 | --git https://{quoted}@github.com/team/repo.git |
--hook https://hooks.slack.com/services/T{slack} | --hook=https://discord.com/api/webhooks/{discord} | --bearer {} |
--bearer={} | --hmac {} | --hmac={} | --hmac_key={} | --webhook-hmac {} | --ldap.bindpw={} | --ldap.bindpw {} |
--ldap-bind-pw {} | --ldap.bindPw={} | --password -{} | --token -{} | --api-key=-{} | "--password=it's {}" |
--wandb-key={} | --hf-token {} | "--password=the {}" | --password "it's {}" |
'--password=it'"'"'s {}' | '--password=it'\\''s {}'
"""
_OVERRIDES = """
trainer.logger.wandb.key={} | +trainer.wandb.key={} | ++a.b.key={} | "++a.b.key='{}'" |
"trainer.wandb_api_key=\\"{}\\"" | +trainer.logger.mlflow.password={} |
+ray_kwargs.ray_init.runtime_env.env_vars.HF_TOKEN={} | "ray_init.runtime_env.env_vars={{OPENAI_KEY:{},A:b}}" |
"+reward.extra={{api_key: {}, model: gpt-4o}}" | +ldap.bindpw={} | trainer.wandb_api_key={} |
+trainer.logger.password={} | ray_init.runtime_env.env_vars={{WANDB_API_KEY:{},A:b}} |
'--config={{"api_key": "{}", "lr": 1}}' | --proxy=https://user:{quoted}@host/path | redis://:{quoted}@host
"""
_COMMANDS = """
vllm serve Qwen/Qwen2.5-7B --api-key {} --port 8000 | vllm serve Qwen/Qwen2.5-7B --api-key {} {} --port 8000 |
vllm serve Qwen/Qwen2.5-7B --hf-token {} --port 8000 | vllm serve Qwen/Qwen2.5-7B --hf-token={} --port 8000 |
python load.py --s3-access-key-id {} --port 8000 | python load.py --s3-secret-access-key {} --port 8000 |
python -m sglang.launch_server --admin-api-key {} --port 8000 |
python -m sglang.launch_server --api-key={} --port 8000 |
python -m sglang.launch_server --ssl-keyfile-password {} --port 8000 | wandb login {} |
huggingface-cli login --token {} | curl -u user:{} https://host/path | curl --user user:{} https://host/path |
curl -H "Authorization: Bearer {}" https://host/path | curl -H "Authorization: {}" https://host/path |
curl -H "X-Api-Key: {}" https://host/path | curl -H "PRIVATE-TOKEN: {}" https://host/path |
curl -H "Cookie: a=b; session={}" https://host/path | curl https://host/path?key={} |
curl "https://host/path?alt=json&key={}&x=1" |
curl "https://store.blob.core.windows.net/c/b?sv=2024-11-04&sr=b&sig={}" |
bash -c "export HF_TOKEN={} && python train.py" | docker run -e WANDB_API_KEY={} image |
docker run --env=OPENAI_KEY={} image | docker login -u user --password {} registry |
docker login -u user -p {} registry | docker login -p {} -u user registry | docker login -u user -p{} registry |
/usr/bin/podman login -p={} registry | helm registry login -u user -p {} registry | wandb login --relogin {} |
wandb login --host https://api.wandb.example --relogin {} | wandb login --cloud {} |
python -m wandb login --relogin {} | sshpass -p {} ssh host | sshpass -p{} ssh host | mysql -u root -p{} db |
mysql -h host -uroot -p{} | /usr/bin/mysqldump --all-databases -p{} db | mariadb -u root -p{} db |
redis-cli -h host -a {} ping | mongosh -u user -p {} db | ldapsearch -x -D cn=admin,dc=example -w {} uid=me |
curl -uuser:{} https://host/path | curl -sSu user:{} https://host/path | curl -u "user:{}" https://host/path |
curl -X POST -L -U user:{} https://host/path | curl --proxy-user user:{} https://host/path |
curl -b session={} https://host/path | curl -b "a=b; session={}" https://host/path |
curl -bsession={} https://host/path | curl -s -b session={} -u user https://host/path |
curl --cookie session={} https://host/path | curl --oauth2-bearer {} https://host/path |
bash -c "HF_TOKEN={} python train.py --lr 3e-4" | bash -c 'HF_TOKEN={} python train.py --lr 3e-4' |
bash -lc "WANDB_API_KEY='{}' python train.py --lr 3e-4" | sh -c "LR=1 HF_TOKEN={} python train.py --lr 3e-4"
"""

_VARIABLES = """
HF_TOKEN={} | HF_TOKEN_READ={} | HF_TOKEN_WRITE_2={} | HUGGING_FACE_HUB_TOKEN={} | GITHUB_PAT={} | GH_PAT_PROD={} |
OPENAI_KEY={} | OPENAI_API_KEY_2={} | OPENAI_APIKEY={} | ANTHROPIC_API_KEY_DEV={} | WANDB_API_KEY={} | WANDB_KEY={} |
COMET_API_KEY={} | NEPTUNE_API_TOKEN={} | CLEARML_API_SECRET_KEY={} | CLEARML_API_ACCESS_KEY={} | SWANLAB_API_KEY={} |
MLFLOW_TRACKING_PASSWORD={} | MLFLOW_TRACKING_TOKEN={} | AWS_SECRET_ACCESS_KEY={} | AWS_SESSION_TOKEN={} |
AZURE_STORAGE_KEY={} | AZURE_STORAGE_ACCOUNT_KEY={} | AZURE_CLIENT_SECRET={} | ALIBABA_CLOUD_ACCESS_KEY_SECRET={} |
OSS_ACCESS_KEY_SECRET={} | VOLC_SECRETKEY={} | PGPASSWORD={} | MYSQL_PWD={} | SSHPASS={} | DB_PASS={} |
REDIS_PASSWORD={} | RAY_AUTH_TOKEN={} | VLLM_API_KEY={} | MODAL_TOKEN_SECRET={} | TWINE_PASSWORD={} | DOCKER_AUTH={} |
JWT_SECRET={} | SECRET_KEY_BASE={} | LDAP_BINDPW={} | LDAP_BIND_PW={} | HMAC_SECRET={} | WEBHOOK_HMAC={} | BEARER={} |
"DB_PASSWORD=two words {}" | FERNET_KEY={} | SLACK_BOT_TOKEN={}
"""

# In texts: a mapping, a YAML file, a shell's script, a list of a pod's variables.
_ENVIRONMENT_TEXTS = [
    "environ({{'HOME': '/root', 'HF_TOKEN_READ': '{}', 'LR': '1'}})",
    '{{"env_vars": {{"OPENAI_KEY": "{}", "LR": "1"}}}}',
    '{{\\"env_vars\\": {{\\"GITHUB_PAT\\": \\"{}\\", \\"LR\\": \\"1\\"}}}}',
    "env:\n  HF_TOKEN: {}\n  LR: 1",
    "env:\n- name: OPENAI_API_KEY\n  value: {}\n- name: LR",
    '[{{"name": "HF_TOKEN", "value": "{}"}}, {{"name": "LR"}}]',
    'export WANDB_KEY="{}"\nexport LR=1',
    "os.environ['HF_TOKEN'] = '{}'  # LR",
    'os.environ["OPENAI_KEY"]="{}"  # LR',
    "os.environ.setdefault('HF_TOKEN', '{}')  # LR",
    "setx OPENAI_API_KEY {} # LR",
    "//npm.example.com/:_authToken={}\nLR",
    "machine api.wandb.ai login user password {}\nLR",
]

_ERRORS = [
    "Incorrect API key provided: {}. You can find your API key at https://host.",
    "AuthenticationError: Error code: 401 - {{'error': {{'message': 'Incorrect API key provided: {}.', 'code': 1}}}}",
    "Invalid API key: {} (401)",
    "Invalid API Key '{}' (401)",
    "API key {} is not valid (401)",
    "The access token {} has expired (401)",
    "The provided token '{}' has expired (401)",
    "invalid token: {} (401)",
    "Invalid bearer token: {} (401)",
    "Token is: {} (401)",
    "password is {} (401)",
    "HTTPError: 403 for url: https://host/v1/models?key={} (401)",
    "HTTPError: 403 for url: https://host/v1/models?alt=json&key={}&page=2 (401)",
    "HTTPError: 403 for url: https://host/v1/models?access_token={} (401)",
    "HTTPError: 403 for url: https://host/v1/models?api_key={}&page=2 (401)",
    "HTTPError: 403 for url: https://c.blob.core.windows.net/c/b?sv=2024-11-04&sp=r&sig={}&se=2026 (401)",
    "HTTPError: 403 for url: https://b.s3.amazonaws.com/k?X-Amz-Algorithm=A&X-Amz-Signature={} (401)",
    "HTTPError: 403 for url: https://b.s3.amazonaws.com/k?X-Amz-Security-Token={}&X-Amz-Date=1 (401)",
    "HTTPError: 403 for url: https://storage.googleapis.com/b/k?X-Goog-Signature={}&x=1 (401)",
    "HTTPError: 403 for url: https://b.oss-cn-x.aliyuncs.com/k?OSSAccessKeyId=me&Signature={} (401)",
    "HTTPError: 403 for url: https://qyapi.weixin.qq.com/cgi-bin/webhook/send?key={} (401)",
    "HTTPError: 403 for url: https://oapi.dingtalk.com/robot/send?access_token={} (401)",
    "HTTPError: 404 for url: https://hooks.slack.com/services/T{slack} (401)",
    "HTTPError: 404 for url: https://discord.com/api/webhooks/{discord} (401)",
    "HTTPError: 404 for url: https://discordapp.com/api/webhooks/{discord} (401)",
    "HTTPError: 404 for url: https://open.feishu.cn/open-apis/bot/v2/hook/{uuid} (401)",
    "HTTPError: 404: https://team.webhook.office.com/webhookb2/{uuid}@{uuid}/IncomingWebhook/{hex}/{uuid} (401)",
    '{{"api_key": "{}", "model": "m"}} (401)',
    '{{\\"api_key\\": \\"{}\\", \\"model\\": \\"m\\"}} (401)',
    '{{\\\\\\"api_key\\\\\\": \\\\\\"{}\\\\\\", \\\\\\"model\\\\\\": 1}} (401)',
    "{{'api_key': '{}', 'model': 'm'}} (401)",
    "{{b'api_key': b'{}', b'model': b'm'}} (401)",
    "('api_key', '{}') (401)",
    "[('api_key', '{}'), ('model', 'm')] (401)",
    "[(b'authorization', b'Bearer {}'), (b'accept', b'*/*')] (401)",
    "[['x-api-key', '{}'], ['accept', '*/*']] (401)",
    '{{"api_keys": ["{}", "{}"], "model": "m"}} (401)',
    "api_keys: [{}, {}] (401)",
    "headers={{'Authorization': 'Bearer {}', 'Accept': '*/*'}} (401)",
    "headers={{'Authorization': 'token {}', 'Accept': '*/*'}} (401)",
    "headers={{'Authorization': 'Basic {}', 'Accept': '*/*'}} (401)",
    "headers={{'Proxy-Authorization': '{}', 'Accept': '*/*'}} (401)",
    "headers={{'Cookie': 'a=b; session={}', 'Accept': '*/*'}} (401)",
    "b'Authorization: Bearer {}' (401)",
    "Authorization: Bearer {}\nAccept: */* (401)",
    "> authorization: Api-Key {}\n> accept: */* (401)",
    "x-goog-api-key: {}\nAccept: */* (401)",
    "Set-Cookie: session={}; Path=/\nAccept: */* (401)",
    "Command '['curl', '-u', 'user:{}', 'https://host']' (401)",
    "Command 'curl -u user:{} https://host' (401)",
    "Command '['train', '--openai_key', '{}', '--lr', '1']' (401)",
    "Command '['train', '--password=two words {}', '--lr']' (401)",
    "could not connect to postgres://user:{}@host:5432/db (401)",
    "could not connect to postgresql+psycopg2://user:{}@host/db (401)",
    "could not connect to redis://:{}@host:6379/0 (401)",
    "could not connect to mongodb+srv://user:{}@host/db (401)",
    "could not connect to amqp://user:p@{quoted}@host/db (401)",
    "could not clone https://{quoted}@github.com/team/repo.git (401)",
    "could not clone https://oauth2:{}@gitlab.com/team/repo.git (401)",
    "dsn=host=n1 user=me password={} dbname=x (401)",
    "DefaultEndpointsProtocol=https;AccountName=me;AccountKey={};EndpointSuffix=core.windows.net (401)",
    "Endpoint=sb://me.servicebus.windows.net/;SharedAccessKeyName=Root;SharedAccessKey={} (401)",
    "connect(host='n1', user='me', passwd='{}') (401)",
    "Client(api_key='{}', model='m') (401)",
    "Command '['false', '--hf-token', '{}', '--api-key={}']' failed",
    "train.py --hf-token {} --lr 1",
    "connect(host=n1, pwd={})",
    "https://b.s3.amazonaws.com/x?X-Amz-Signature={}",
    "-----BEGIN PRIVATE KEY-----\n{}, cut",
    "Client(api_key=SecretStr('{}'), model='m') (401)",
    "Client(auth=('user', '{}'), model='m') (401)",
    "LLMConfig(model='m', openai_key='{}', n=1) (401)",
    "ValidationError: api_key\n  Input should be shorter [type=string_too_long, input_value={{'api_key': '{}'}}] (401)",
    "1 validation error for M\napi_key\n  Input is no integer [type=int_parsing, input_value='{}', input_type=str]",
    '2 validation errors for M\njudges.0.api_key\n  Value error, bad [type=x, input_value="{}", input_type=str]',
    "E('1 validation error for M\\npassword\\n  Input is bad [type=x, input_value=\\'{}\\', input_type=str]')",
    "1 validation error for M\napi_keys\n  Bad [type=x, input_value=['{}', 'lr'], input_type=list]",
    "[{{'type': 'x', 'loc': ('body', 'api_key'), 'msg': 'Input should be an integer', 'input': '{}', 'ctx': 1}}]",
    '{{"detail":[{{"type":"x","loc":["body","api_key"],"msg":"Input should be an integer","input":"{}"}}],"n":1}}',
    "Value '{}' of type 'str' could not be converted to Integer\n    full_key: judge.api_key\n    object_type=dict",
    "Invalid leading whitespace, reserved character(s), or return character(s) in header value: ' {}' (401)",
    "Invalid leading whitespace, reserved character(s), or return character(s) in header value: b'{}\\n' (401)",
    "Invalid leading whitespace, reserved character(s), or return character(s) in header value: 'Bearer {}\\n' (401)",
    "Invalid header value b' {}' (401)",
    "Illegal header value b'{} ' (401)",
    'Illegal header value b"{}\\n" (401)',
    "failed: train.py --password=it's {} --lr 1",
    "failed: train.py --password=it's {}\nnext (401)",
    "connect(password='it's {}', n=1) (401)",
    "Command 'HF_TOKEN={} python train.py --lr 3e-4' returned non-zero exit status 1.",
    "Command '['bash', '-c', 'HF_TOKEN={} python train.py --lr 3e-4']' returned non-zero exit status 1.",
    "Command '['bash', '-c', \"HF_TOKEN='{}' python train.py --lr 3e-4\"]' returned non-zero exit status 1.",
    "Command '['docker', 'login', '-u', 'me', '-p', '{}', 'registry']' (401)",
    "Command '['mysql', '-u', 'root', '-p{}', 'db']' (401)",
    "Command '['curl', '-b', 'session={}', 'https://host']' (401)",
    "Command '['curl', '-sSu', 'user:{}', 'https://host']' (401)",
    "Command '['train', '--password', '-{}', '--lr']' (401)",
    "Command '['wandb', 'login', '--relogin', '{}']' (401)",
    '["docker", "login", "-p", "{}", "registry"] (401)',
    '["docker","login","-p","{}","registry"] (401)',
    '{{\\"args\\": [\\"docker\\", \\"login\\", \\"-p\\", \\"{}\\", \\"registry\\"]}} (401)',
    "docker login \\\n  -u me \\\n  -p {} \\\n  registry",
    '{{"bearer": "{}", "n": 1}} (401)',
    "{{'ldap': {{'bindpw': '{}', 'n': 1}}}} (401)",
    "ldap:\n  bindpw: {}\n  n: 1",
    "bad token: '{}' (401)",
    "Client(token='{}', user_id=3) (401)",
    "got secret: {} (401)",
    "secret = {} (401)",
    "secret={}\nnext=1 (401)",
    "password:\t{} (401)",
    "client_secret => {} (401)",
    "api_key%3D{}%26x (401)",
    "-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY----- (401)",
    "-----BEGIN OPENSSH PRIVATE KEY-----\n{}\n-----END OPENSSH PRIVATE KEY----- (401)",
    "-----BEGIN PGP PRIVATE KEY BLOCK-----\n{}\n-----END PGP PRIVATE KEY BLOCK----- (401)",
    "-----BEGIN RSA PRIVATE KEY-----\\n{}\\n-----END RSA PRIVATE KEY----- (401)",
]

# Parts of a token: its prefix, then alphabets with lengths, or more text.
_FORMATS: dict[str, list[tuple[str, int] | str]] = {
    "Hugging Face": ["hf", "_", (string.ascii_letters, 34)],
    "Hugging Face organization": ["api", "_org_", (string.ascii_letters, 34)],
    "OpenAI legacy": ["sk", "-", (_ALNUM, 20), "T3Blbk", "FJ", (_ALNUM, 20)],
    "OpenAI project": ["sk", "-proj-", (_URL, 74), "T3Blbk", "FJ", (_URL, 74)],
    "OpenAI service account": ["sk", "-svcacct-", (_URL, 74), "T3Blbk", "FJ", (_URL, 74)],
    "Anthropic": ["sk", "-ant-api03-", (_URL, 93), "AA"],
    "OpenRouter": ["sk", "-or-v1-", (_HEX, 64)],
    "DeepSeek": ["sk", "-", (_HEX, 32)],
    "Groq": ["gsk", "_", (_ALNUM, 52)],
    "Replicate": ["r8", "_", (_ALNUM, 37)],
    "Perplexity": ["pplx", "-", (_ALNUM, 48)],
    "Fireworks": ["fw", "_", (_ALNUM, 24)],
    "Tavily": ["tvly", "-", (_ALNUM, 32)],
    "Tavily, development": ["tvly", "-dev-", (_ALNUM, 32)],
    "xAI": ["xai", "-", (_ALNUM, 80)],
    "NVIDIA": ["nvapi", "-", (_URL, 64)],
    "Cerebras": ["csk", "-", (_LOWER + _DIGITS, 48)],
    "Together": ["tgp", "_v1_", (_URL, 43)],
    "LangSmith": ["lsv2", "_pt_", (_HEX, 32), "_", (_HEX, 10)],
    "Pinecone": ["pcsk", "_", (_ALNUM, 6), "_", (_ALNUM, 63)],
    "Jina": ["jina", "_", (_HEX, 32), (_ALNUM, 28)],
    "E2B": ["e2b", "_", (_HEX, 40)],
    "Firecrawl": ["fc", "-", (_HEX, 32)],
    "W&B v1": ["wandb", "_v1_", (_ALNUM, 40)],
    "W&B server": ["local", "-", (_HEX, 40)],
    "Neptune": ["eyJ", "hcGlfYWRkcmVzcyI6", (_ALNUM, 60), "=="],
    "Modal id": ["ak", "-", (_ALNUM, 22)],
    "Modal secret": ["as", "-", (_ALNUM, 22)],
    "RunPod": ["rpa", "_", (_UPPER + _DIGITS, 40), (_LOWER + _DIGITS, 6)],
    "Databricks": ["da", "pi", (_HEX, 32)],
    "Prefect": ["pnu", "_", (_ALNUM, 36)],
    "AWS": ["AK", "IA", (_UPPER + "234567", 16)],
    "AWS, temporary": ["AS", "IA", (_UPPER + "234567", 16)],
    "AWS Bedrock": ["AB", "SK", (_ALNUM, 110)],
    "Alibaba": ["LT", "AI", (_ALNUM, 20)],
    "Tencent": ["AK", "ID", (_ALNUM, 32)],
    "Google API": ["AI", "za", (_URL, 35)],
    "Google OAuth": ["ya", "29.", (_URL, 60)],
    "Google client secret": ["GOC", "SPX-", (_URL, 28)],
    "Azure AD": [(_ALNUM, 3), "8", "Q~", (_ALNUM, 34)],
    "DigitalOcean": ["dop", "_v1_", (_HEX, 64)],
    "Vault service": ["hv", "s.", (_URL, 95)],
    "Vault batch": ["hv", "b.", (_URL, 140)],
    "Vault legacy": ["s", ".", (_ALNUM, 24)],
    "Terraform": [(_ALNUM, 14), ".atlas", "v1.", (_URL, 64)],
    "Docker": ["dckr", "_pat_", (_URL, 27)],
    "npm": ["npm", "_", (_ALNUM, 36)],
    "PyPI": ["pypi", "-AgEIcHlwaS5vcmc", (_URL, 70)],
    "GitHub": ["gh", "p_", (_ALNUM, 36)],
    "GitHub OAuth": ["gh", "o_", (_ALNUM, 36)],
    "GitHub app": ["gh", "s_", (_ALNUM, 36)],
    "GitHub fine-grained": ["github", "_pat_", (_ALNUM, 22), "_", (_ALNUM, 59)],
    "GitLab": ["gl", "pat-", (_URL, 20)],
    "GitLab deploy": ["gl", "dt-", (_URL, 20)],
    "GitLab job": ["gl", "cbt-", (_HEX, 2), "_", (_URL, 20)],
    "GitLab runner": ["gl", "rt-", (_URL, 20)],
    "Atlassian": ["ATAT", "T3", (_URL, 186)],
    "Bitbucket": ["AT", "BB", (_ALNUM, 32)],
    "Slack bot": ["xox", "b-", (_DIGITS, 12), "-", (_DIGITS, 12), "-", (_ALNUM, 24)],
    "Slack app": ["xapp", "-1-A", (_UPPER + _DIGITS, 10), "-", (_DIGITS, 13), "-", (_HEX, 64)],
    "Slack configuration": ["xoxe", ".xoxp-1-", (_UPPER + _DIGITS, 163)],
    "Discord": ["M", (_ALNUM, 25), ".", (_ALNUM, 6), ".", (_URL, 38)],
    "Telegram": [(_DIGITS, 10), ":A", "A", (_URL, 33)],
    "Stripe": ["sk", "_live_", (_ALNUM, 24)],
    "Stripe, restricted": ["rk", "_live_", (_ALNUM, 24)],
    "SendGrid": ["S", "G.", (_URL, 22), ".", (_URL, 43)],
    "Twilio": ["S", "K", (_HEX, 32)],
    "Mailgun": ["key", "-", (_HEX, 32)],
    "Grafana Cloud": ["glc", "_", (_ALNUM, 60)],
    "Grafana": ["glsa", "_", (_ALNUM, 32), "_", (_HEX, 8)],
    "Sentry": ["sntrys", "_eyJpYXQiO", (_ALNUM, 90), "_", (_ALNUM, 43)],
    "Sentry, user": ["sntryu", "_", (_HEX, 64)],
    "New Relic": ["NR", "AK-", (_UPPER + _DIGITS, 27)],
    "Linear": ["lin", "_api_", (_ALNUM, 40)],
    "Notion": ["ntn", "_", (_DIGITS, 11), (_ALNUM, 35)],
    "Postman": ["PM", "AK-", (_HEX, 24), "-", (_HEX, 34)],
    "Doppler": ["dp", ".pt.", (_ALNUM, 43)],
    "Pulumi": ["pu", "l-", (_HEX, 40)],
    "Tailscale": ["ts", "key-auth-", (_ALNUM, 16), "-", (_ALNUM, 32)],
    "Supabase": ["sb", "p_", (_HEX, 40)],
    "PostHog": ["ph", "x_", (_ALNUM, 44)],
    "Age": ["AGE-SECRET", "-KEY-1", ("QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L", 58)],
    "1Password": ["ops", "_eyJ", (_ALNUM, 252)],
    "OpenShift": ["sha", "256~", (_URL, 43)],
    "JWT": ["ey", "J", (_ALNUM, 30), ".eyJ", (_ALNUM, 40), ".", (_URL, 43)],
}


def _token(parts: list[tuple[str, int] | str]) -> str:
    return "".join(part if isinstance(part, str) else _made(*part) for part in parts)


TOKENS = {name: _token(parts) for name, parts in _FORMATS.items()}

# Host and path of each webhook; `{}` is the secret.
WEBHOOKS: dict[str, tuple[str, str]] = {
    "Slack": ("hooks.slack.com", "/services/T0A1B2C3D/B0A1B2C3D/{}"),
    "Slack, short": ("hooks.slack.com", "/services/T0/B0/{}"),
    "Slack workflow": ("hooks.slack.com", "/workflows/T0A1B2C3D/A0A1B2C3D/123456789/{}"),
    "Slack trigger": ("hooks.slack.com", "/triggers/E0A1B2C3D/123456789/{}"),
    "Slack for governments": ("hooks.slack-gov.com", "/services/T0A1B2C3D/B0A1B2C3D/{}"),
    "Discord": ("discord.com", "/api/webhooks/123456789012345678/{}"),
    "Discord, version": ("ptb.discord.com", "/api/v10/webhooks/123456789012345678/{}/slack"),
    "Discord interaction": ("discord.com", "/api/v10/interactions/123456789012345678/{}/callback"),
    "Teams": ("team.webhook.office.com", "/webhookb2/3fa85f64-5717@3fa85f64-5717/IncomingWebhook/{}/3fa85f64-5717"),
    "Teams, old": ("outlook.office.com", "/webhook/3fa85f64-5717@3fa85f64-5717/IncomingWebhook/{}/3fa85f64-5717"),
    "Teams workflow": (
        "prod-1.westus.logic.azure.com",
        "/workflows/0a1b/triggers/manual/paths/invoke?api-version=2016-06-01&sp=%2Ftriggers%2Frun&sv=1.0&sig={}",
    ),
    "Power Platform": (
        "default0a1b.environment.api.powerplatform.com",
        "/powerautomate/automations/direct/workflows/0a1b/triggers/manual/paths/invoke?api-version=1&sv=1.0&sig={}",
    ),
    "Feishu": ("open.feishu.cn", "/open-apis/bot/v2/hook/{}"),
    "Feishu, old": ("open.feishu.cn", "/open-apis/bot/hook/{}"),
    "Feishu flow": ("www.feishu.cn", "/flow/api/trigger-webhook/{}"),
    "Lark": ("open.larksuite.com", "/open-apis/bot/v2/hook/{}"),
    "DingTalk": ("oapi.dingtalk.com", "/robot/send?access_token={}"),
    "WeCom": ("qyapi.weixin.qq.com", "/cgi-bin/webhook/send?key={}"),
    "Telegram": ("api.telegram.org", "/bot1234567890:{}/sendMessage"),
    "Telegram file": ("api.telegram.org", "/file/bot1234567890:{}/photos/1.jpg"),
}
# Texts of requests 2.34, urllib3 2.8, httpx 0.28, aiohttp 3.14, http.client, and of JSON with escaped slashes.
_WEBHOOK_TEXTS = [
    "HTTPSConnectionPool(host='{host}', port=443): Max retries exceeded with url: {path} (Caused by X(\"refused\"))",
    "E('HTTPSConnectionPool(host=\\'{host}\\', port=443): Max retries exceeded with url: {path} (Caused by X())')",
    "HTTPSConnectionPool(host='{host}', port=443): Max retries exceeded with url: https://{host}{path} (Caused by X())",
    'https://{host}:443 "POST {path} HTTP/1.1" 404 None',
    "404 Client Error: Not Found for url: https://{host}{path}\nnext",
    "Client error '404 Not Found' for url 'https://{host}{path}'\nFor more information check: https://host",
    "404, message='Not Found', url='https://{host}{path}' next",
    "<Request('POST', 'https://{host}{path}')>",
    "ClientResponseError(RequestInfo(url=URL('https://{host}:443{path}'), method='POST'), (), status=404)",
    "URL can't contain control characters. '{path}' (found at least ' ')",
    "SplitResult(scheme='https', netloc='{host}', path='{path}', fragment='')",
    '{{"url": "https:\\/\\/{host}{escaped}", "n": 1}}',
    '"{{\\"url\\": \\"https:\\\\/\\\\/{host}{escaped_twice}\\", \\"n\\": 1}}"',
    "https://proxy.example.com/?to=https%3A%2F%2F{host}{quoted}&n=1",
    "{{'HOOK': 'https://{host}{path}', 'n': 1}}",
    "HOOK=https://{host}{path} python train.py",
    "command: train.py --hook '{path}' --lr 1",
]


def _of_webhook(host: str, path: str) -> list[tuple[str, str]]:
    """Return the texts with this webhook, and the secret in each."""
    secret = _made(_ALNUM, 36)
    path = path.format(secret)
    forms = {
        "host": host,
        "path": path,
        "escaped": path.replace("/", "\\/"),
        "escaped_twice": path.replace("/", "\\\\/"),
        "quoted": quote(path, ""),
    }
    return [(text.format(**forms), secret) for text in _WEBHOOK_TEXTS]


# Paths and hosts without a secret that look like webhooks, in the same texts.
_PLAIN_WEBHOOKS = [
    text.format(host=host, path=path, escaped=path.replace("/", "\\/"), escaped_twice=path, quoted=quote(path, ""))
    for host, path in (
        ("hooks.example.com", "/services/api/v1/users"),
        ("example.com", "/services/Train/Base/model"),
        ("example.com", "/workflows/TRAIN/triggers/manual"),
        ("example.com", "/api/webhooks/12345678/deliveries"),
        ("discord.com", "/api/v10/channels/123456789012345678/messages"),
        ("outlook.office.com", "/mail/inbox"),
        ("open.feishu.cn", "/open-apis/bot/v3/info"),
        ("qyapi.weixin.qq.com", "/cgi-bin/webhook/send?debug=1"),
        ("api.telegram.org", "/bots/faq"),
        ("huggingface.co", "/api/models/Qwen/Qwen2.5-7B/tree/main?recursive=1"),
    )
    for text in _WEBHOOK_TEXTS
]

# Options without a secret whose names contain a word that often names a secret.
_PLAIN_ARGUMENTS = """
--pad_token [PAD] | --pad_token=<pad> | --pad_token=PAD | --eos-token </s> | --eos-token=<|im_end|> |
--bos_token=<s> | --unk_token [UNK] | --image_token <image> | --image-token=IMG_CONTEXT | --stop_token eos |
--stop_token=EOT | --mask_token=MASK | --think_end_token </think> | --additional_special_tokens=END |
--pad_token_id 151643 | --stop_token_id=151643 | --use-cookie --x | --use_auth_token --lr 1 | --token --lr 1 |
--use_auth_token=True | --use_auth_token true | --token=None | --hub_token=null | --hub_token=<HUB_TOKEN> |
--api-key=$OPENAI_API_KEY | --api-key ${OPENAI_API_KEY} | --api-key EMPTY | --num_tokens 512 | --max_tokens=512 |
--max-num-batched-tokens 8192 | --max-num-scheduled-tokens 8192 | --num-speculative-tokens 5 |
--max_total_tokens=1000000000 | --token_budget 512 | --num_loss_tokens_to_skip 1 | --spec-tokens 4 |
--long-prefill-token-threshold 2048 | --dbo-decode-token-threshold=32 | --speculative-num-draft-tokens 4 |
--tokenizer /models/tok | --tokenizer=Qwen/Qwen2.5-7B-Instruct | --tokenizer-mode auto | --skip-tokenizer-init |
--disable-fast-tokenizer --lr 1 | --uld_token_merge_strategy=mean | --include_num_input_tokens_seen non_padding |
--average_tokens_across_devices True | --data.prompt_key input | --data.input_key question |
--data.label_key=answer_text | --data.chosen_key chosen | --data.rejected_key rejected | --data.image_key image |
--ckpt.best_metric_key eval_math500_pass1 | --ssl-keyfile /etc/key.pem | --ssl-keyfile key.pem |
--ssl-key server.key | --key-file=id_rsa | --token-file ~/.cache/huggingface/token | --token-path=tok.txt |
--private-key /etc/key.pem | --key /etc/key.pem | --ssh-key ~/.ssh/id_ed25519 |
--credentials=gs://bucket/credentials.json | --credentials ./credentials.json | --allow-credentials |
--allow_credentials=True | --key-bits 2048 | --bypass_mode=fast | --num-passes 3 | --passes=2 | --author alice42bob7 |
--authority=example42x7y | --auth-type=basic | --auth_mode managed | --auth none | --secret-name my-team-secret2 |
--api-key-env OPENAI_API_KEY | --password-length 16 | --primary_key id | --sort-key created_at |
--group_by_keys=level,split | --keys prompt,response | --pass_at_k=8 | --pass_config.fuse_norm=true |
--monkey=banana12x4y | --keyboard qwerty12x4y | --compass=north12x4y | --patience 3 | --path /data |
--pattern=*.safetensors | --signal SIGUSR1 | --design a4b5c6d7e8 | --lr 1e-6 -p 8080:80 |
docker run -u 1000:1000 image | python -u train.py | data.prompt_key=prompt | data.response_key=extra_info.answer |
data.reward_fn_key=data_source | data.image_key=images | data.tools_key=tools | data.messages_key=messages |
reward.key=score | reward.key=score_v2 | data.max_response_token=512 | actor.ppo_max_token_len_per_gpu=16384 |
actor.loss_agg_mode=token-mean | actor.loss_agg_mode=seq-mean-token-sum-norm | trainer.balance_dp_token=True |
algorithm.token_level=true | profiler.profile_token_start=10 | model.external_lib=null |
+data.apply_chat_template_kwargs.enable_thinking_key=enable_thinking | data.train_files=/data/gsm8k/train.parquet |
actor.model.path=hf_checkpoint_converted | ckpt=hf_checkpoint | env HF_TOKEN_PATH=/root/.cache/token python train.py |
https://host/path?a=b&key=name | git@github.com:team/repo.git | nccl://HOST:PORT | tcp://10.0.0.1:29500 |
s3://bucket/task-force-1-and-more-of-these | wandb login --relogin |
wandb login --relogin --host https://api.wandb.example | docker run -p 8080:80 -u 1000:1000 image |
docker login -u me registry.example.com | ssh -p 2222 host | mysql -u root -p db | mysql --port 3306 -u root db |
mongod --port 27017 | redis-cli -h host -p 6379 ping | curl -u user https://host/path |
curl -u $USER:$PASSWORD https://host/path | curl -b cookies.txt https://host/path |
curl -s -o out.json https://host/path | mkdir -p dir | sort -b a=b | --hmac sha256 | --bearer | --bearer --lr 1 |
--password --verbose | --password -v | --token -j 8 | --use_auth_token --output-dir=a1b2c3d4e5f6a7 | --pw 1024 |
python -m verl.trainer.main_ppo data.prompt_key=prompt data.max_prompt_length=512 reward.key=score |
train --max-tokens=100 --tokenizer=/models/tok tokenizer_mode=auto actor.lr=1e-6 | a token --lr 1 |
train task-force-1 https://host/path?a=b PWD=/here |
bash -c "LR=1 python train.py --lr 3e-4" | bash -c "HF_TOKEN=$HF_TOKEN python train.py --lr 3e-4"
"""

_PLAIN_ENVIRONMENTS = """
PWD=/home/me/rl | OLDPWD=/home/me | TOKENIZERS_PARALLELISM=false | HF_HOME=/data/hf | HF_HUB_ENABLE_HF_TRANSFER=1 |
HF_TOKEN= | HF_TOKEN_PATH=/root/.cache/huggingface/token | WANDB_PROJECT=verl_grpo_example_gsm8k |
WANDB_MODE=offline | WANDB_API_KEY=$KEY | WANDB_API_KEY=${WANDB_API_KEY} | OPENAI_API_KEY=EMPTY |
OPENAI_API_KEY=None | OPENAI_API_KEY=<your key> |
use '<HUB_TOKEN>' | export HF_TOKEN='<HF_TOKEN>' first | VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE=163840 |
VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD=1024 | VLLM_USE_FASTOKENS=1 | VLLM_ENABLE_PREGRAD_PASSES=1 |
NVTE_FUSED_ATTN_CK_USES_BWD_V3=1 | CUDA_VISIBLE_DEVICES=0,1,2,3 | NCCL_SOCKET_IFNAME=eth0 |
NCCL_IB_HCA=mlx5_0:1,mlx5_1:1 | SSH_AUTH_SOCK=/tmp/ssh-abc/agent.1 | GOOGLE_APPLICATION_CREDENTIALS=/etc/gcp.json |
AWS_SHARED_CREDENTIALS_FILE=/root/.aws/credentials | AWS_WEB_IDENTITY_TOKEN_FILE=/var/run/token |
AUTOPROF_STEPS=2,10:13,::50 | RAY_ADDRESS=10.0.0.1:6379 | KEYCHAIN=login12x4y5z | PASSENGERS=a1b2c3d4e5
"""

_PLAIN_TOKENS = """
hf_checkpoint | hf_transfer is not installed | hf_hub_download failed | load_hf_weights_to_fsdp_model | sk-learn |
scikit-learn | task-force-1-and-some-more-words | disk-utilization-is-very-high | gsk_model | r8_quantized | fw_pass |
fw_module_hook | s.forward | self.s.parameters | SG.forward | SKIPPED_BECAUSE_OF_SOMETHING | AKIA | AKIDO |
key-value cache | key-value-cache-of-layer-12 | as-is | ak-47 | local-rank | local-batch-size-per-gpu | npm_package |
pypi-server | xai-grok | glc_context | eyJ | 3fa85f64-5717-4562-b3fc-2c963f66afa6 |
commit 0123456789abcdef0123456789abcdef01234567 |
sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855 | Qwen/Qwen2.5-VL-7B-Instruct |
global_step_100/actor/model_world_size_8_rank_0.pt | verl.workers.fsdp_workers.ActorRolloutRefWorker.update_actor |
torch.distributed.fsdp.fully_sharded_data_parallel | 10.0.0.1:29500 | 2026-08-21T10:53:01.123456Z |
MI300X.gfx942.rocm-6.2.4-and-more
"""

_PLAIN_ERRORS = """
token='hello' has no id | token='hello' is not in the vocabulary | token: 'hello', logprob: -0.5 |
first bad token: 'hello' | bad token: 'hello' | wrong token='hello' at 3 |
ChatCompletionTokenLogprob(token='hello', bytes=[104, 101], logprob=-0.3, top_logprobs=[TopLogprob(token='hi')]) |
{"token": "hello", "logprob": -0.3, "bytes": [104, 101]} | Logprob(logprob=-0.1, rank=1, decoded_token='hello') |
tokenizer: token 'hello' has no id |
1 validation error for M\nsteps\n  Bad [type=int_parsing, input_value='abc', input_type=str] |
1 validation error for M\nprompt_key\n  Bad api_key [type=int_parsing, input_value='hello', input_type=str] |
[{'type': 'x', 'loc': ('steps',), 'msg': 'Input should be a valid token', 'input': 'abc'}] |
Value 'abc' of type 'str' could not be converted to Integer\n    full_key: trainer.steps\n    object_type=dict |
Header value must be str or bytes, not <class 'int'> | Invalid header name b'X Y' |
Invalid leading whitespace, reserved character(s), or return character(s) in header name: ' X-Job' |
password: it's not valid | token: isn't valid | it's the user's token | the 'key' isn't set, it's 'prompt' |
hmac=sha256 | Command 'LR=1 python train.py --lr 3e-4' returned non-zero exit status 1. |
user login failed for alice -p 12 | wandb login failed: try again | mysql server has gone away |
curl: (22) The requested URL returned error: 403 | Unexpected token: ')' |
Unexpected token '<', "<!DOCTYPE "... is not valid JSON | Unexpected token: foo1bar2baz3 |
SyntaxError: unexpected token at line 3 | token 151643 is out of range | token id 151643 is out of range [0, 151642] |
token: 151643 | loss_per_token=0.5 | loss_per_token: 0.5, max_response_token=512 | max_response_token=512 |
tokens/s: 1234.5, tokens: 5.1k | tokens: [1, 2, 3] | stop_token_ids=[151643, 151645] |
eos_token='<|im_end|>', pad_token='<|endoftext|>' | special_tokens={'eos_token': '</s>', 'pad_token': '[PAD]'} |
Asking to pad but the tokenizer does not have a padding token: pad_token |
The token `<|im_end|>` is not in the vocabulary | special token: im_end1x2y3 | next token: Hello123world456 |
KeyError: 'prompt_key' | KeyError: 'HF_TOKEN' | KeyError: 'Qwen2VLForConditionalGeneration2' | KeyError: 151643 |
Missing key(s) in state_dict: "model.layers.0.self_attn.q_proj.weight" |
Unexpected key(s) in state_dict: "lm_head.weight", "model.layers.10.mlp.w1" |
unexpected key: model.layers.0.mlp.experts.12.w13_weight | missing keys: ['actor.w1', 'critic.w2'] | key: prompt |
key=rank, value=3 | Key 'prompt_key' is not in struct\n    full_key: data.prompt_key\n    object_type=dict |
ConfigKeyError: Key 'foo' not in 'FSDPConfig'\n    full_key: actor.foo2 |
got an unexpected keyword argument 'api_key' | __init__() missing 1 required argument: 'api_key' |
fields ['api_key', 'model', 'temperature'] are required | api_key: str = None |
def f(token: Optional[str], key: int) | API key must be 40 characters long, yours was 5 |
The api_key client option must be set either by passing api_key to the client or by OPENAI_API_KEY |
Unable to locate credentials | Access token is not set | password: required | Invalid username or password. |
token: expired | No API key provided. | Headers({'authorization': '[secure]', 'accept': '*/*'}) |
password=***, user=me | got signature: (a, b) | signature: forward(self, x) |
no signature found for builtin <built-in method> | bearer of bad news | Basic configuration is wrong |
basic tokenization failed | Bearer token is missing | connection to nccl://HOST:PORT failed |
token: nccl://10.0.0.1:29500 | init_method=tcp://10.0.0.1:29500 | connect to nccl://10.0.0.1:29500/worker@rank0 |
see https://pytorch.org/docs/stable/notes/cuda.html#environment-variables | ssh: connect to host n1 port 22 |
FileNotFoundError: '/root/.cache/huggingface/token' | RuntimeError: key_padding_mask: torch.Size([2, 3]) |
query.shape=(2, 3), key.shape=(2, 3), value.shape=(2, 3) |
expected key and value to have the same dtype, got key: torch.float32 |
The size of tensor a (4) must match tensor b (3) at dimension 1 | kv_cache key: 0, layer: 3 |
sort by key=lambda row: row.score | backward pass: 12ms, forward pass: 3.2s | pass@1: 0.5, pass rate: 0.25 |
pass: ok | author: alice42bob7 | authentication: managed42x7y | monkey=banana12x4y |
CUDA error: device-side assert triggered | ValueError: 5 is not a multiple of 4: a=1, b=2 |
actor rank 3 vanished in update_actor of step 6 |
Ray: The actor died unexpectedly before finishing this task. pid=1234, ip=10.0.0.1 | user login failed for alice |
A cookie: none | use_cookie=False | secrets: 3 | see secrets.py:12 | /run/secrets/token: permission denied |
path=/home/me/secret/data.parquet
"""


def _texts(block: str, form: str = "{}") -> list[str]:
    """Return the texts of a block, each within `form`."""
    return [form.replace("{}", text, 1) for text in block.strip().replace(" |\n", " | ").split(" | ")]


def _filled(text: str) -> list[tuple[str, str]]:
    """Return each text that is made from this form, and the secret in it."""
    if not any(word in text for word in ("{slack}", "{discord}", "{uuid}")):
        return [
            (text.format(*[value] * 4, quoted=quote(value, "")), quote(value, "") if "{quoted}" in text else value)
            for value in VALUES
        ]
    secret, identity = _made(_ALNUM, 24), str(uuid.UUID(int=_random.getrandbits(128), version=4))
    if "{discord}" in text:
        secret = _made(_URL, 68)
    if "{uuid}" in text:
        secret = identity
    slack = f"{_made(_UPPER + _DIGITS, 9)}/B{_made(_UPPER + _DIGITS, 9)}/{secret}"
    number = _made(_DIGITS, 18)
    return [(text.format(slack=slack, discord=f"{number}/{secret}", uuid=identity, hex=_made(_HEX, 32)), secret)]


# Kind -> forms, each with its texts and the secret in each text.
MUST_HIDE: dict[str, dict[str, list[tuple[str, str]]]] = {
    ARGUMENT: {
        text: _filled(text)
        for text in (
            *_texts(_OPTIONS, "python train.py {} --lr 1e-6"),
            *_texts(_OVERRIDES, "python train.py {} trainer.nnodes=1"),
            *_texts(_COMMANDS),
        )
    },
    ENVIRONMENT: {text: _filled(text) for text in (*_texts(_VARIABLES, "env {} python train.py"), *_ENVIRONMENT_TEXTS)},
    TOKEN: {name: [(f"request with {token} failed", token)] for name, token in TOKENS.items()},
    ERROR: {text: _filled(text) for text in _ERRORS},
    WEBHOOK: {name: _of_webhook(*hook) for name, hook in WEBHOOKS.items()},
}
MUST_SHOW: dict[str, list[str]] = {
    ARGUMENT: _texts(_PLAIN_ARGUMENTS),
    ENVIRONMENT: _texts(_PLAIN_ENVIRONMENTS),
    TOKEN: _texts(_PLAIN_TOKENS),
    ERROR: _texts(_PLAIN_ERRORS),
    WEBHOOK: _PLAIN_WEBHOOKS,
}
