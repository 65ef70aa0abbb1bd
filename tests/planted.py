"""A labelled set made at run time: values of 22 kinds in 10 contexts each way, and near-misses that must stay.

Development and held-out sets differ by seed and by contexts: rules were tuned on the first only. No secret stands whole
in this file: formats are put together from parts.
"""

from __future__ import annotations

import base64
import json
import random
import string
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

ALNUM = string.ascii_letters + string.digits
HEX = "0123456789abcdef"
WORDS = "river stone orange window candle rocket garden silver thunder pepper monkey harbor velvet copper".split()
NAMES = "jdoe asmith m.mueller lchen karl.berg tnguyen olga_p rpatel s.lopez bwayne2 fatima.k hans-peter".split()


class Sample(NamedTuple):
    """A text, and the places of the values planted in it (none for a near-miss)."""

    kind: str
    text: str
    value: str


def pick(rng: random.Random, alphabet: str, length: int) -> str:
    return "".join(rng.choice(alphabet) for _ in range(length))


def mixed(rng: random.Random, alphabet: str, length: int) -> str:
    """Random characters with at least two digits and two letters."""
    while True:
        value = pick(rng, alphabet, length)
        if sum(c.isdigit() for c in value) >= 2 and sum(c.isalpha() for c in value) >= 2:
            return value


def password(rng: random.Random) -> str:
    style = rng.randrange(10)
    word = rng.choice(WORDS)
    if style < 3:
        return mixed(rng, ALNUM, rng.randint(8, 16))
    if style < 6:
        return mixed(rng, ALNUM + "!#%*-_+=?.^", rng.randint(8, 20)).strip("!#%*-_+=?.^") + rng.choice(["7", "x", "!"])
    if style < 8:
        return word.capitalize() + str(rng.randint(1, 2030)) + rng.choice(["", "!", "#", "?!"])
    if style == 8:
        return "-".join(rng.sample(WORDS, 3)) + str(rng.randint(1, 99))
    return word + rng.choice(WORDS)


def b64(data: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(data).encode()).decode().rstrip("=")


def jwt(rng: random.Random) -> str:
    head = {"alg": rng.choice(["HS256", "RS256", "ES256"]), "typ": "JWT"}
    return ".".join(
        [b64(head), b64({"sub": pick(rng, HEX, 12), "iat": rng.randrange(10**9)}), pick(rng, ALNUM + "-_", 43)]
    )


def pem(rng: random.Random) -> str:
    name = rng.choice(["", "RSA ", "EC ", "OPENSSH ", "ENCRYPTED ", "DSA "]) + "PRIVATE KEY"
    lines = [pick(rng, ALNUM + "+/", 64) for _ in range(rng.randint(3, 12))] + [pick(rng, ALNUM, 30) + "=="]
    return "\n".join(["-----BEGIN " + name + "-----", *lines, "-----END " + name + "-----"])


def card(rng: random.Random) -> str:
    prefix, length = rng.choice(
        [("4", 16), ("51", 16), ("55", 16), ("2221", 16), ("34", 15), ("37", 15), ("6011", 16), ("3530", 16)]
    )
    body = prefix + pick(rng, string.digits, length - len(prefix) - 1)
    check = next(d for d in string.digits if luhn(body + d))
    digits = body + check
    separator = rng.choice(["", " ", "-"])
    cuts = (0, 4, 10, 15) if length == 15 else (0, 4, 8, 12, 16)
    return separator.join(digits[a:b] for a, b in zip(cuts, cuts[1:], strict=False))


def luhn(digits: str) -> bool:
    total = 0
    for index, digit in enumerate(reversed(digits)):
        value = int(digit) * (2 if index % 2 else 1)
        total += value - 9 if value > 9 else value
    return total % 10 == 0


def iban(rng: random.Random) -> str:
    country, length = rng.choice([("DE", 22), ("GB", 22), ("FR", 27), ("NL", 18), ("ES", 24), ("CH", 21)])
    bank = "".join(rng.sample(string.ascii_uppercase, 4)) if country in ("GB", "NL") else ""
    body = bank + pick(rng, string.digits, length - 4 - len(bank))
    number = int("".join(str(int(c, 36)) for c in body + country + "00"))
    plain = f"{country}{98 - number % 97:02}{body}"
    return plain if rng.random() < 0.5 else " ".join(plain[i : i + 4] for i in range(0, length, 4))


def phone(rng: random.Random) -> str:
    d = lambda n: pick(rng, "23456789", n)  # noqa: E731
    return rng.choice(
        [
            f"+49 {d(3)} {d(7)}",
            f"+1 {d(3)} {d(3)} {d(4)}",
            f"+44 20 {d(4)} {d(4)}",
            f"+33{d(9)}",
            f"({d(3)}) {d(3)}-{d(4)}",
            f"{d(3)}-{d(3)}-{d(4)}",
            f"+1-{d(3)}-{d(3)}-{d(4)}",
            f"+41 {d(2)} {d(3)} {d(2)} {d(2)}",
            f"0{d(3)}-{d(7)}",
            f"+353 (0) {d(2)} {d(3)} {d(4)}",
        ]
    )


def ipv4(rng: random.Random) -> str:
    o = lambda: rng.randint(1, 254)  # noqa: E731
    return rng.choice(
        [
            f"10.{rng.randint(0, 60)}.{o()}.{o()}",
            f"172.{rng.randint(16, 26)}.{o()}.{o()}",
            f"192.168.{rng.randint(0, 190)}.{o()}",
        ]
    )


def ipv6(rng: random.Random) -> str:
    h = lambda: f"{rng.randrange(1, 65536):x}"  # noqa: E731
    return rng.choice(
        [
            f"fd{pick(rng, HEX, 2)}:{h()}:{h()}::{h()}",
            f"fe80::{h()}:{h()}:{h()}:{h()}",
            f"fd00:{h()}:{h()}:{h()}:{h()}:{h()}:{h()}:{h()}",
        ]
    )


def host(rng: random.Random) -> str:
    name = rng.choice(["web", "db", "dc", "srv-fin", "jump", "mail", "git", "vpn", "ws-hr"]) + rng.choice(
        ["01", "2", "-a", "17", ""]
    )
    return name + rng.choice(
        [".corp.acme.com", ".acme.com", ".hq.internal", ".prod.corp", ".office.lan", ".ad.intra", ".site2.local"]
    )


def mac(rng: random.Random) -> str:
    pairs = ["00", *(pick(rng, HEX, 2) for _ in range(4)), rng.choice(HEX) + "b"]
    style = rng.randrange(4)
    if style == 0:
        return "".join(pairs[0:2]) + "." + "".join(pairs[2:4]) + "." + "".join(pairs[4:6])
    text = ("-" if style == 1 else ":").join(pairs)
    return text.upper() if style == 2 else text


VALUES: dict[str, Callable[[random.Random], str]] = {
    "aws-id": lambda r: "AK" + "IA" + pick(r, string.ascii_uppercase + "234567", 16),
    "aws-secret": lambda r: mixed(r, ALNUM + "+/", 38) + "k9",
    "github": lambda r: r.choice(["gh" + "p_", "gh" + "s_", "gh" + "o_"]) + pick(r, ALNUM, 36),
    "slack": lambda r: (
        "xo" + r.choice(["xb-", "xp-"]) + f"{pick(r, '123456789', 11)}-{pick(r, '123456789', 12)}-{pick(r, ALNUM, 24)}"
    ),
    "google": lambda r: "AI" + "za" + pick(r, ALNUM + "-_", 34) + "Q",
    "stripe": lambda r: r.choice(["sk", "rk"]) + "_li" + "ve_" + pick(r, ALNUM, 24),
    "bearer": lambda r: mixed(r, ALNUM + "-_", r.randint(30, 60)) + "a1",
    "jwt": jwt,
    "pem": pem,
    "api-key": lambda r: mixed(r, r.choice([ALNUM, HEX]), r.choice([24, 32, 40])),
    "url-password": lambda r: mixed(r, ALNUM + "!.-_~", 10) + "x",
    "config-password": password,
    "command-password": lambda r: mixed(r, ALNUM + "!.-_", 9) + "x",
    "connection-password": lambda r: mixed(r, ALNUM + "!.-_#", 11) + "x",
    "mail": lambda r: (
        r.choice(NAMES)
        + "@"
        + r.choice(["acme.com", "corp.acme.com", "gmail.com", "partner-bank.de", "mail.partner.co.uk"])
    ),
    "user-path": lambda r: r.choice(NAMES),
    "ipv4": ipv4,
    "ipv6": ipv6,
    "host": host,
    "mac": mac,
    "card": card,
    "phone": phone,
    "iban": iban,
}

# Two lists of contexts for each kind: development, then held out.
CONTEXTS: dict[str, tuple[list[str], list[str]]] = {
    "aws-id": (
        [
            "aws_access_key_id = {}",
            "key {} was leaked in the repo.",
            '{{"AccessKeyId": "{}"}}',
            "export AWS_ACCESS_KEY_ID={}",
            "creds: [{}, other]",
        ],
        [
            "-var access={} -auto-approve",
            "CloudTrail: userIdentity.accessKeyId={} eventName=PutObject",
            "s3://{}:x@bucket",
            "We rotated {}; see ticket.",
            "<key>{}</key>",
        ],
    ),
    "aws-secret": (
        [
            "aws_secret_access_key = {}",
            '"SecretAccessKey": "{}",',
            "export AWS_SECRET_ACCESS_KEY={}",
            "secret_key: '{}'",
            'AWS_SECRET_KEY="{}" ./run',
        ],
        [
            "    aws_secret_access_key: {}",
            "secretAccessKey => '{}'",
            "set AWS_SECRET_ACCESS_KEY={}\r\n",
            '<add key="aws_secret_key" value="{}" />',
            "client = boto3.client('s3', aws_secret_access_key=\"{}\")",
        ],
    ),
    "github": (
        [
            "git clone https://{}@github.com/acme/app.git",
            "GITHUB_TOKEN={}",
            "token: {}",
            "curl -H 'Authorization: token {}' https://api",
            "The bot used {} on Monday.",
        ],
        [
            "GH_PAT='{}' gh pr list",
            '{{"auth": "{}"}}',
            "remote: {} is not valid",
            "//npm.pkg.github.com/:_authToken={}",
            "echo {} | docker login ghcr.io",
        ],
    ),
    "slack": (
        [
            "SLACK_BOT_TOKEN={}",
            "slack: {{token: {}}}",
            "client = WebClient('{}')",
            "posted with {}.",
            "?token={}&channel=C1",
        ],
        [
            "hubot --slack {} --verbose",
            'slack_api_token => "{}"',
            "Revoked: {}, {}".replace(", {}", ""),
            "  - name: SLACK\n    value: {}",
            "log: auth.test {} ok",
        ],
    ),
    "google": (
        [
            "https://maps.googleapis.com/maps/api/js?key={}",
            "GOOGLE_API_KEY: {}",
            "apiKey: '{}',",
            "key={} in the app",
            'var k = "{}";',
        ],
        [
            '<meta-data android:value="{}"/>',
            "firebaseConfig = {{apiKey: '{}'}}",
            "curl 'https://x.test/v1?k={}&y'",
            "String({})",
            "Key {}, unrestricted",
        ],
    ),
    "stripe": (
        [
            "STRIPE_SECRET={}",
            "stripe.api_key = '{}'",
            "curl https://api.stripe.com/v1/charges -u {}:",
            "key {} (live)",
            '"sk": "{}"',
        ],
        ["Stripe::Key.new('{}')", "pay:\n  secret: {}", "found {} in JS", "-e SK={} pay:latest", "log.info(key={})"],
    ),
    "bearer": (
        [
            "Authorization: Bearer {}",
            "curl -H 'Authorization: Bearer {}' https://api.partner.test",
            '"authorization": "Bearer {}"',
            "> authorization: bearer {}\n",
            "headers = {{'Authorization': 'Bearer {}'}}",
        ],
        [
            'req.Header.Set("Authorization", "Bearer {}")',
            '-H "authorization: Bearer {}" -X POST',
            "2024-05-01 WARN rejected Bearer {} from gateway",
            "Authorization=Bearer {}",
            'Invoke-RestMethod -Headers @{{Authorization="Bearer {}"}}',
        ],
    ),
    "jwt": (
        ["Cookie: session={}", "id_token={}&state=1", "jwt: {}", "Decoded {} with alg none", '"access_token":"{}"'],
        [
            "Set-Cookie: auth={}; HttpOnly",
            "ws://x.test/?t={}",
            "[debug] claims of {} ok",
            "localStorage.setItem('jwt', '{}')",
            "<token>{}</token>",
        ],
    ),
    "pem": (
        ["{}", "key:\n{}\n", "cat <<EOF > id_rsa\n{}\nEOF", "Attached is the key:\n\n{}\n\nRegards", "tls.key: |\n{}"],
        [
            "$ cat server.key\n{}\n$ exit",
            'PRIVATE="{}"',
            "<ca>\n</ca>\n<key>\n{}\n</key>",
            "> {}",
            "Content-Type: application/x-pem-file\n\n{}\n--b",
        ],
    ),
    "api-key": (
        ["api_key = {}", "API-KEY: {}", '"apiKey": "{}"', "client_secret={}&grant_type=x", "x-api-key: {}"],
        [
            'DATADOG_API_KEY="{}"',
            "--api-key {} --region eu",
            '<add key="ApiKey" value="{}"/>',
            "'encryption_key' => '{}',",
            'config["secret_key"] = "{}"',
        ],
    ),
    "url-password": (
        [
            "postgres://app:{}@10x.db:5432/app",
            "amqp://guest:{}@queue/vhost",
            "git clone https://bob:{}@git.acme.test/r.git",
            "redis://:{}@cache:6379/0",
            "DATABASE_URL=mysql://root:{}@db/x?ssl=1",
        ],
        [
            "mongodb+srv://svc:{}@cluster0.x.mongodb.net/test",
            "curl ftp://user1:{}@files/path",
            "proxy = http://u.name:{}@proxy:3128",
            '<repo url="https://ci:{}@repo/maven"/>',
            "Failed to fetch https://x:{}@pypi/simple (403)",
        ],
    ),
    "config-password": (
        [
            "password={}",
            "db_password: {}",
            '{{"user": "bob", "password": "{}"}}',
            "2024-01-02 12:00:01 login user=bob password={} ok",
            "$password = '{}';",
            'PASSWORD = "{}"',
            "<password>{}</password>",
            "spring.datasource.password={}",
            'The password is "{}".',
            "DB_PASS={}",
        ],
        [
            "[db]\nuser = x\npwd = {}\n",
            "requirepass: {}",
            "ENV MYSQL_ROOT_PASSWORD={}",
            '"smtp": {{"pass": "{}"}}',
            "auth failed for bob (password: '{}')",
            '  passphrase: "{}"',
            "userPassword: {}\ncn: x",
            "define('DB_PASSWORD', '{}');",
            'credentials.password := "{}"',
            "ansible_ssh_pass='{}' ansible_user=x",
        ],
    ),
    "command-password": (
        [
            "mysql -u root -p{} app",
            "sshpass -p '{}' ssh root@web",
            "curl -u admin:{} https://x.test/",
            "tool --password {} --user x",
            "net user bob {} /add",
        ],
        [
            "mysqldump --single-transaction -ubackup -p{} --all-databases",
            "mosquitto_pub --username x --password={} -t a",
            "redis-cli -h cache -a {} ping",
            "docker login -u ci -p {} registry.test",
            'New-LocalUser x -Password (ConvertTo-SecureString "{}" -AsPlainText -Force)',
        ],
    ),
    "connection-password": (
        [
            "Server=db;Database=x;User Id=sa;Password={};Encrypt=true",
            "Driver={{SQL}};Uid=a;Pwd={};",
            "host=db user=a password={} dbname=x",
            "jdbc:postgresql://db/x?user=a&password={}&ssl=true",
            "Data Source=x;User ID=y;Password='{}'",
        ],
        [
            "jdbc:sqlserver://db:1433;databaseName=x;user=sa;password={};",
            '"ConnectionString": "Host=db;Username=a;Password={};Port=5432"',
            "DSN=prod;UID=app;PWD={}",
            "amqps;Username=a;Password={};Vhost=/",
            "ldap bind dn=cn=admin password={}, retry",
        ],
    ),
    "mail": (
        ["From: {}", "Contact {} for help.", "user=<{}>, method=PLAIN", '"email": "{}"', "mailto:{}?subject=x"],
        [
            "Reported by {}; cc the team",
            "rcpt to:<{}> 250 ok",
            "git commit --author='X <{}>'",
            "upn={}\tresult=0",
            "({}) asked",
        ],
    ),
    "user-path": (
        [
            "/home/{}/.ssh/id_rsa",
            "C:\\Users\\{}\\AppData\\Local\\Temp\\x.exe",
            "/Users/{}/Library",
            '"path": "C:\\\\Users\\\\{}\\\\Desktop"',
            "cd /home/{} && ls",
        ],
        [
            "file:///home/{}/notes.txt",
            "C:/Users/{}/Downloads/a.zip",
            "Image: C:\\Users\\{}\\x.ps1 loaded",
            "-v /home/{}:/data",
            "/mnt/c/Users/{}/src",
        ],
    ),
    "ipv4": (
        ["Accepted from {} port 22", "{}:8080", "src={} dst=8.8.8.8", "ssh root@{}", '"ip":"{}"'],
        ["[{}] GET /", "route add {}/24 via x", "Lateral movement to {}.", "http://{}/admin", "host({})"],
    ),
    "ipv6": (
        ["from {} port 22", "[{}]:443", "inet6 {}/64 scope", "src={}", '"ip": "{}"'],
        ["http://[{}]/x", "neighbor {} dev eth0", "ping6 {}%eth0", "AAAA {}", "({})"],
    ),
    "host": (
        ["ssh {}", "https://{}/login", "Could not resolve {}.", "host={}", '"server": "{}"'],
        ["nslookup {} 8.8.8.8", "mount {}:/export /mnt", "smtp;{}", "CN={},OU=x", "beacon from {} seen"],
    ),
    "mac": (
        ["ether {} txqueuelen", "DHCPACK to {} via eth0", "mac={}", '"hw": "{}"', "{} dev"],
        ["arp: {} is at x", "lladdr {} REACHABLE", "({})", "BSSID:{} ch 6", "host a {{ hardware ethernet {}; }}"],
    ),
    "card": (
        ["card={}", "pan: {}", "paid with {}.", '"number":"{}"', "CC {} exp 12/27"],
        ["Visa/MC {} declined", "<pan>{}</pan>", "dump: {};cvv", "customer gave {} by phone", "acct\t{}\tok"],
    ),
    "phone": (
        ["Call {} now", "phone: {}", "Tel. {}", '"mobile": "{}"', "signature\n{}\n"],
        ["reach me on {}.", "fax={}", "vishing from {} again", "<tel>{}</tel>", "SMS to {}: code"],
    ),
    "iban": (
        ["IBAN: {}", "pay to {}.", '"iban":"{}"', "account {} blocked", "({})"],
        ["invoice says {}, BIC X", "<IBAN>{}</IBAN>", "iban={};amount=1", "mule account {}", "- {}"],
    ),
}


# What the first two held-out rounds used; the rules have been mended on them since.
SETTLED: dict[str, list[str]] = {
    "aws-id": ["terraform: access_key = \"{}\"", "AWSAccessKeyId={}&Expires=1", "Found hardcoded {} in app.jar", "| {} | active |", "provider aws {}"],
    "aws-secret": ["secret_key = \"{}\" # prod", "{{'aws_secret_access_key': '{}'}}", "AWS_SECRET_ACCESS_KEY: {}", "-e AWS_SECRET_ACCESS_KEY={} img", "fs.s3a.secret.key={}"],
    "github": ["pip install git+https://{}@github.com/o/r", "with:\n  token: {}", "os.environ['T'] = '{}'", "<{}>", "Leaked PAT: {}."],
    "slack": ["xoxc? no, {}", "SLACK={};", "[slack]\ntoken = {}", "Authorization: Bearer {}", "'{}'"],
    "google": ["geocode/json?address=x&key={}", "\"current_key\": \"{}\"", "--key={}", "({})", "GMAPS {}\n"],
    "stripe": ["Authorization: Bearer {}", "stripe listen --api-key {}", "<!-- {} -->", "secretKey={}", "live key {}?"],
    "bearer": ["http GET x 'Authorization:Bearer {}'", "\"Authorization\" => \"Bearer {}\"", "Authorization: token {}", "proxy log: hdr=[Authorization: Bearer {}]", "conn.setRequestProperty(\"Authorization\", \"Bearer {}\");"],
    "jwt": ["Authorization: JWT {}", "eyJ? see {}", "GET /cb#id_token={}", "x-amzn-oidc-data: {}", "(token {})"],
    "pem": ["\"private_key\": \"{}\"", "--- a/key.pem\n{}", "    {}", "BEGIN\n{}\nEND", "printf '{}' > k"],
    "api-key": ["apikey={}", "X-Api-Key: {}", "NEW_RELIC_LICENSE_KEY={}", "  client-secret: {}", "const apiSecret = '{}';"],
    "url-password": ["remote = https://deploy:{}@git.host/x.git", "smb://DOM;joe:{}@nas/share", "CELERY_BROKER=pyamqp://u:{}@mq//", "[https://a:{}@b.c/d](x)", "rtsp://admin:{}@192.0.2.7/live"],
    "config-password": [
        "machine x login bob password {}", "smtp.password = {}", "'PASSWORD': '{}',", "set system login password \"{}\"", "keystore.pass={}",
        "Password: {}", "{{\\\"password\\\": \\\"{}\\\"}}", "wifi passphrase = {}", "CREATE USER x IDENTIFIED BY '{}';", "kubectl create secret generic db --from-literal=password={}",
    ],
    "command-password": ["curl -su svc:{} http://x/", "mysql -h db -uapp -p'{}' -e 'select 1'", "psql \"host=db password={}\"", "java -jar x.jar --spring.datasource.password={}", "evil-winrm -i h -u bob -p {}"],
    "connection-password": ["sqlcmd conn: Server=s;User=u;Pwd={};", "Provider=SQLOLEDB;Password={};Persist=1", "mongodb: user=x;password={}", "jdbc:oracle:thin:@x?user=u&password={}", "SharedSecret;Password=\"{}\";"],
    "mail": ["To: \"X\" <{}>", "{} clicked the link", "sender={}, size=1", "ldap: mail: {}", "[{}](mailto)"],
    "user-path": ["PWD=/home/{}", "C:\\Users\\{}\\NTUSER.DAT opened", "cwd: '/Users/{}/git/x'", "\\\\fs\\c$\\Users\\{}\\Desktop", "/home/{}: permission denied"],
    "ipv4": ["IN=eth0 SRC={} DST=8.8.4.4", "nmap -sV {}", "{} -> 1.1.1.1", "\\\\{}\\c$", "ip={};"],
    "ipv6": ["SRC={} DST=x", "nmap -6 {}", "{} -> ::1", "sshd[1]: from {}", "[\"{}\"]"],
    "host": ["ping {}", "CNAME {}.", "Subject: CN={}", "//{}/share", "{}:389"],
    "mac": ["HWaddr {}", "client_mac: {}", "station {} associated", "<mac>{}</mac>", "{}\t10"],
    "card": ["PAN={};", "4-ever? {}", "track2: {}", "VISA: {}", "[{}]"],
    "phone": ["mob: {}", "Hotline {} (24/7)", "tel:{}", "from={} to=x", "- {}"],
    "iban": ["to {} today", "IBAN {}", "acct={}", "\"{}\"", "Konto: {}"],
}  # fmt: skip


# Written after the rules were settled, and not tuned on.
HELD_OUT: dict[str, list[str]] = {
    "aws-id": ["[profile ci]\naws_access_key_id={}\n", "AssumeRole by {} at 10:00", "tfstate has \"access_key\": \"{}\""],
    "aws-secret": ["[profile ci]\naws_secret_access_key={}\n", "$env:AWS_SECRET_ACCESS_KEY = '{}'", "\"secret_access_key\": \"{}\"}}"],
    "github": ["gh auth login --with-token <<< {}", "actions log: token=***, real={}", "Bearer {}"],
    "slack": ["chat.postMessage {{'token': '{}'}}", "bot: {} (revoked)", "SLACK_TOKEN: \"{}\""],
    "google": ["staticmap?size=1&key={}\"", "gapi.load('{}')", "GOOGLE_KEY={}; run"],
    "stripe": ["sk: {}", "pay.configure(\"{}\")", "(see {}, rotated)"],
    "bearer": ["{{\"headers\": {{\"Authorization\": \"Bearer {}\"}}}}", "wget --header='Authorization: Bearer {}' u", "axios.defaults.headers = `Bearer {}`"],
    "jwt": ["auth_token={};", "{{\"jwt\": \"{}\"}}", "leaked JWT {}, expired"],
    "pem": ["ssl_certificate_key inline:\n{}\n", "{}\n{{}}", "key = \"\"\"{}\"\"\""],
    "api-key": ["OPENWEATHER_API_KEY={}", "apiKey={}&lang=en", "{{\"client_secret\": \"{}\"}}"],
    "url-password": ["url: jdbc:x://u:{}@h/db", "ssh://git:{}@git/x", "export http_proxy=http://me:{}@proxy:8080"],
    "config-password": ["MYSQL_PASSWORD: {}", "password => \"{}\",", "admin_password = '{}'", "<Password>{}</Password>", "user: bob, password: {}", "[ERROR] bind failed, pwd={}"],
    "command-password": ["sshpass -p{} scp a b:", "mysqladmin -uroot -p{} status", "curl --user u:{} ftp://x", "app.exe /password {}", "borg --passphrase {} list"],
    "connection-password": ["Server=a;UID=b;PWD={};Pooling=no", "pg: dbname=x user=y password={}", "conn = \"Data Source=a;Password={}\""],
    "mail": ["cc: {};", "{}: mailbox full", "login={} ok"],
    "user-path": ["scp a.txt h:/home/{}/", "at C:\\Users\\{}\\AppData\\Roaming", "open(\"/Users/{}/x.csv\")"],
    "ipv4": ["client {} disconnected", "{}, 8.8.8.8", "tcp://{}:4444"],
    "ipv6": ["listen on [{}]:80", "dst {},", "addr: {}"],
    "host": ["tracert {}", "kinit to {} failed", "\"fqdn\": \"{}\""],
    "mac": ["wlan0: {}", "lease to {};", "MAC address {}."],
    "card": ["charged {} today", "cc_number={}", "\"{}\""],
    "phone": ["Contact: {}", "caller {}, 3 min", "\"phone\": \"{}\""],
    "iban": ["Please transfer to {}", "{}; BIC", "[{}]"],
}  # fmt: skip


def planted(
    kinds: dict[str, Callable[[random.Random], str]], *, seed: int, held_out: bool, count: int = 50
) -> list[Sample]:
    """``count`` samples of each kind."""
    rng = random.Random(seed)
    samples = []
    for kind, make in kinds.items():
        contexts = HELD_OUT[kind] if held_out else [*CONTEXTS[kind][0], *CONTEXTS[kind][1], *SETTLED[kind]]
        for index in range(count):
            value = make(rng)
            samples.append(Sample(kind, contexts[index % len(contexts)].format(value), value))
    return samples


def near_misses(*, seed: int, held_out: bool, count: int = 50) -> list[Sample]:
    """``count`` texts of each kind of thing that looks like a secret and is none."""
    rng = random.Random(seed)
    hexes = lambda n: pick(rng, HEX, n)  # noqa: E731
    digits = lambda n: pick(rng, string.digits, n)  # noqa: E731
    octets = lambda: (
        f"{rng.choice([8, 45, 91, 185, 203])}.{rng.randint(1, 250)}.{rng.randint(1, 250)}.{rng.randint(1, 250)}"
    )  # noqa: E731
    placeholders = [
        "<your-password>",
        "${DB_PASS}",
        "changeme",
        "{{ vault_password }}",
        "$PASSWORD",
        "********",
        "%DB_PASSWORD%",
        "your_password_here",
        "null",
        "os.environ['DB_PASS']",
        "[REDACTED]",
        "xxxxxxxx",
        "getpass.getpass()",
        "!vault |",
        "REPLACE_ME",
    ]
    failing = "4" + digits(14)
    makers: dict[str, tuple[list[Callable[[], str]], list[Callable[[], str]]]] = {
        "git-sha": ([lambda: f"commit {hexes(40)}", lambda: f"index {hexes(7)}..{hexes(7)} 100644"], [lambda: f"Fixed in {hexes(40)}.", lambda: f"HEAD is now at {hexes(10)} tidy"]),
        "uuid": ([lambda: f"id={uuid.UUID(int=rng.getrandbits(128))}", lambda: f"request {uuid.UUID(int=rng.getrandbits(128))}"], [lambda: f"{{{uuid.UUID(int=rng.getrandbits(128))}}}", lambda: f"trace_id: {uuid.UUID(int=rng.getrandbits(128))}"]),
        "cve": ([lambda: f"CVE-{rng.randint(1999, 2025)}-{digits(5)} is exploited", lambda: f"T1{digits(3)}.00{digits(1)} and CWE-{digits(3)}"], [lambda: f"see CVE-{rng.randint(1999, 2025)}-{digits(4)} (CVSS 9.8)", lambda: f"CAPEC-{digits(3)}, TA00{digits(2)}"]),
        "version": ([lambda: f"version 10.{digits(1)}.{digits(2)}.{digits(1)}", lambda: f"numpy=={digits(1)}.{digits(2)}.{digits(1)}", lambda: f"Windows 10.0.{rng.randint(10000, 22000)}.{digits(3)}"], [lambda: f"firmware: v10.{digits(1)}.{digits(1)}.{digits(2)}", lambda: f"app-{digits(1)}.{digits(2)}.{digits(1)}.tar.gz", lambda: f"Chrome/{digits(3)}.0.{digits(4)}.{digits(2)}"]),
        "time": ([lambda: f"2024-0{rng.randint(1, 9)}-1{digits(1)}T1{digits(1)}:{rng.randint(10, 59)}:{rng.randint(10, 59)}.123+0200", lambda: f"ts=1{digits(9)}.{digits(6)}"], [lambda: f"[1{digits(1)}/Jan/2024:10:{rng.randint(10, 59)}:00 +0100] GET", lambda: f"epoch_us={17}{digits(14)}"]),
        "base64": ([lambda: f"data:image/png;base64,{base64.b64encode(rng.randbytes(90)).decode()}"], [lambda: f"<img src='data:image/gif;base64,{base64.b64encode(rng.randbytes(60)).decode()}'>", lambda: f"Content: {base64.b64encode(rng.randbytes(57)).decode()}"]),
        "hash": ([lambda: f"SHA256: {hexes(64)}", lambda: f"md5,{hexes(32)}", lambda: f"hash = {hexes(40)}"], [lambda: f"{hexes(64)}  dropper.exe", lambda: f"sha1={hexes(40)} imphash={hexes(32)}", lambda: f"SHA256:{base64.b64encode(rng.randbytes(32)).decode().rstrip('=')} ssh fingerprint"]),
        "public-ip": ([lambda: f"C2 at {octets()}:443", lambda: f"from {octets()} port {digits(4)}"], [lambda: f"{octets()[:-2].rstrip('.')}[.]{digits(1)} is the beacon", lambda: f"AAAA 2a00:{hexes(4)}:{hexes(4)}::{hexes(2)}"]),
        "domain": ([lambda: f"https://{hexes(6)}.evil-{hexes(3)}.ru/x", lambda: "user@example.com wrote"], [lambda: f"hxxp://bad{hexes(4)}[.]top/gate.php", lambda: f"admin@example.org or api{hexes(2)}.example.net"]),
        "placeholder": ([lambda: f"password: {rng.choice(placeholders)}", lambda: f"api_key={rng.choice(placeholders)}"], [lambda: f"DB_PASSWORD={rng.choice(placeholders)}", lambda: f"\"client_secret\": \"{rng.choice(placeholders[:8])}\"", lambda: f"https://user:{rng.choice(['<password>', '${PASS}', 'password'])}@host/x"]),
        "code": ([lambda: "password = get_password(user)", lambda: "def login(user, password: str) -> Token:", lambda: "self.token = token", lambda: "if password == other.password:", lambda: "token_type: bearer", lambda: f"max_tokens = {digits(4)}", lambda: "secretName: tls-secret"], [lambda: "passwd = args.passwd", lambda: "token = response.json()['access_token']", lambda: "password: Optional[str] = None", lambda: "public_key: ssh-rsa", lambda: "const secret = process.env.SECRET;", lambda: f"tokens: {digits(6)}", lambda: "password_policy: strong", lambda: "PasswordAuthentication no"]),
        "prose": ([lambda: "The password must be at least 12 characters.", lambda: "Failed password for root from 203.0.113.9", lambda: "Password spraying is T1110.003.", lambda: "Bearer authentication is required.", lambda: "It bypasses the token check: see below."], [lambda: "Passwords: never reuse them.", lambda: "The secret is to patch early.", lambda: "token: the smallest unit of text", lambda: "User password: incorrect", lambda: "Pass the hash (T1550.002) is common", lambda: "The key is under the mat."]),
        "phone-like": ([lambda: f"order {digits(4)}-{digits(4)}", lambda: f"part 1{digits(2)}-0{digits(2)}-{digits(4)}", lambda: f"+{digits(2)} bytes"], [lambda: f"ISBN 978-0-{digits(3)}-{digits(5)}-{digits(1)}", lambda: f"{digits(3)}.{digits(3)} ms, offset +0x{hexes(6)}", lambda: f"ticket {digits(8)}"]),
        "bad-card": ([lambda: f"id {failing if not luhn(failing + '1') else failing[:-1] + '0'}1" if not luhn(failing + "1") else "id 1234567890123456", lambda: f"trace {9}{digits(15)}"], [lambda: f"order=17{digits(14)}", lambda: f"txid {'8' + digits(15)}"]),
        "mac-like": ([lambda: f"{':'.join(hexes(2) for _ in range(16))}", lambda: f"{':'.join(hexes(2) for _ in range(20))} fingerprint"], [lambda: f"serial {':'.join(hexes(2) for _ in range(8))}", lambda: f"{' '.join(hexes(2) for _ in range(6))}", lambda: f"hex {hexes(12)}"]),
        "registry": ([lambda: f"HKLM\\Software\\Microsoft\\Windows\\CurrentVersion\\Run\\{hexes(5)}", lambda: "C:\\Windows\\System32\\cmd.exe"], [lambda: f"HKEY_CURRENT_USER\\\\Software\\\\{hexes(6)}", lambda: "C:\\Users\\Public\\x.exe", lambda: "%APPDATA%\\Microsoft\\x.dll"]),
        "local-code": ([lambda: "data = threading.local()", lambda: "source /etc/rc.local", lambda: "import acme.internal.utils"], [lambda: "com.acme.internal.Foo extends X", lambda: "cp settings.local.json .env.local", lambda: "this.internal = 5", lambda: "see /usr/local/lib"]),
        "at-code": ([lambda: "npm i left-pad@1.3.0", lambda: "@app.route('/x')", lambda: "icon@2x.png"], [lambda: "curve25519-sha256@libssh.org", lambda: "git@github.com:acme/app.git", lambda: "uses: actions/checkout@v4"]),
        "home-page": ([lambda: "https://x.ru/home/index.html", lambda: "GET /api/users/123", lambda: "/home/$USER/x"], [lambda: "https://api.github.com/users/octocat", lambda: "cd /home/<user>", lambda: "C:\\Users\\%USERNAME%\\x", lambda: "/home/ubuntu/app"]),
        "rfc-range": ([lambda: "allow 10.0.0.0/8 and 192.168.0.0/16", lambda: "127.0.0.1 localhost"], [lambda: "169.254.169.254/latest/meta-data", lambda: "block fe80::/10, fc00::/7", lambda: "ff:ff:ff:ff:ff:ff broadcast"]),
    }  # fmt: skip
    if held_out:
        chosen = _held_out_misses(rng)
    else:
        settled = _settled_misses(rng)
        chosen = {kind: [*lists[0], *lists[1], *settled[kind]] for kind, lists in makers.items()}
    return [Sample(kind, makes[i % len(makes)](), "") for kind, makes in chosen.items() for i in range(count)]


def _settled_misses(rng: random.Random) -> dict[str, list[Callable[[], str]]]:
    hexes = lambda n: pick(rng, HEX, n)  # noqa: E731
    digits = lambda n: pick(rng, string.digits, n)  # noqa: E731
    guid = lambda: str(uuid.UUID(int=rng.getrandbits(128)))  # noqa: E731
    return {
        "git-sha": [lambda: f"merge {hexes(40)} into main", lambda: f"image@sha256:{hexes(64)}", lambda: f"ref: {hexes(8)}"],
        "uuid": [lambda: f"CLSID {{{guid()}}}", lambda: f"correlation-id: {guid()}", lambda: f"/dev/disk/by-uuid/{guid()}"],
        "cve": [lambda: f"cve-2021-{digits(5)}: RCE", lambda: f"CVE-2020-{digits(4)}/CWE-79", lambda: f"T1{digits(3)} ({digits(1)})"],
        "version": [lambda: f"OpenSSH_{digits(1)}.{digits(1)}p1", lambda: f"Release 10.{digits(1)}.{digits(1)}.{digits(1)}", lambda: f"python>=3.{digits(2)}", lambda: f"kernel 5.{digits(2)}.0-{digits(2)}-generic"],
        "time": [lambda: f"Nov 30 1{digits(1)}:00:12 2024", lambda: f"1{digits(12)}", lambda: f"0{rng.randint(1, 9)}/12/2024 08:15:{rng.randint(10, 59)}", lambda: "2024-11-30 10:00:00-05:00"],
        "base64": [lambda: f"powershell -enc {base64.b64encode(rng.randbytes(60)).decode()}", lambda: f"icon: {base64.b64encode(rng.randbytes(48)).decode()}"],
        "hash": [lambda: f"Hashes: MD5={hexes(32)},SHA256={hexes(64)}", lambda: f"hash.md5 == \"{hexes(32)}\"", lambda: f"ssdeep 96:{pick(rng, ALNUM, 40)}:{pick(rng, ALNUM, 20)}", lambda: f"ETag: \"{hexes(32)}\""],
        "public-ip": [lambda: f"A record 93.184.{digits(1)}.34", lambda: f"45.77[.]{digits(2)}[.]1{digits(1)}", lambda: f"AS{digits(5)} 2606:4700::{hexes(4)}", lambda: "resolver 9.9.9.9 and 1.0.0.1"],
        "domain": [lambda: f"http://update-{hexes(4)}.com/a?b=c", lambda: f"DNS query for {hexes(12)}.dyndns.org", lambda: "mailto:you@example.net"],
        "placeholder": [lambda: "password: \"<redacted>\"", lambda: "PASSWORD=${PASSWORD:-}", lambda: "token = <TOKEN>", lambda: "api_key: YOUR_API_KEY", lambda: "secret: {{ .Values.secret }}", lambda: "pwd=%PASSWORD%", lambda: "psql postgres://user:password@localhost/db", "password = ***".__str__, lambda: "passwd: ENC[AES256_GCM,data:x]", lambda: "--password <pw>"],
        "code": [lambda: "password = request.form['password']", lambda: "token = secrets.token_hex(16)", lambda: "if not password: raise", lambda: "password: String,", lambda: "let password = read_line()?;", lambda: "assert token == expected", lambda: "num_tokens=4096", lambda: "secret_ref: vault-prod", lambda: "passwordField.setText(name)", lambda: "key: value", lambda: "primary_key = id", lambda: "password VARCHAR(64) NOT NULL"],
        "prose": [lambda: "Use a password manager.", lambda: "Password reset: see the portal.", lambda: "an attacker with the token can pivot", lambda: "Credentials: stolen via phishing", lambda: "the secret to persistence is a service", lambda: "password for the service account was rotated", lambda: "Passwords were hashed with bcrypt.", lambda: "Basic authentication is disabled", lambda: "The password is stored in clear text."],
        "phone-like": [lambda: f"RFC {digits(4)}, port 1{digits(4)}", lambda: f"doc 0{digits(2)}-{digits(3)}", lambda: f"KB{digits(7)}", lambda: f"score +{digits(1)}.{digits(6)}", lambda: f"pid={digits(5)} tid={digits(5)} 0x{hexes(8)}"],
        "bad-card": [lambda: f"session 1{digits(15)}", lambda: f"SN 0{digits(15)}", lambda: f"{digits(10)}.{digits(10)}"],
        "mac-like": [lambda: f"MD5:{':'.join(hexes(2) for _ in range(16))}", lambda: f"00000010: {' '.join(hexes(4) for _ in range(8))}", lambda: f"nonce {hexes(4)}-{hexes(4)}-{hexes(4)}"],
        "registry": [lambda: f"HKCU:\\Software\\Classes\\{hexes(6)}", lambda: "\\Device\\HarddiskVolume2\\Windows", lambda: "C:\\ProgramData\\x\\y.dat", lambda: "reg add \"HKLM\\SYSTEM\\CurrentControlSet\""],
        "local-code": [lambda: "pkg.internal.New()", lambda: "let x = foo.local;", lambda: "edit /etc/fail2ban/jail.local", lambda: "from .internal import x"],
        "at-code": [lambda: "@Override public", lambda: "pkg@sha256:abc", lambda: "ssh-ed25519-cert-v01@openssh.com", lambda: "user@host:~$ ls", lambda: "scoped @types/node@18.1.0"],
        "home-page": [lambda: "GET /users/42/orders", lambda: "/home/${USER}/bin", lambda: "href=/home/contact", lambda: "%USERPROFILE%\\x", lambda: "C:\\Users\\Administrator\\x"],
        "rfc-range": [lambda: "deny 172.16.0.0/12", lambda: "0.0.0.0:80", lambda: "::1", lambda: "33:33:00:00:00:01", lambda: "255.255.255.0"],
    }  # fmt: skip


def _held_out_misses(rng: random.Random) -> dict[str, list[Callable[[], str]]]:
    hexes = lambda n: pick(rng, HEX, n)  # noqa: E731
    digits = lambda n: pick(rng, string.digits, n)  # noqa: E731
    guid = lambda: str(uuid.UUID(int=rng.getrandbits(128)))  # noqa: E731
    return {
        "git-sha": [lambda: f"tree {hexes(40)}", lambda: f"cherry-picked from {hexes(12)}"],
        "uuid": [lambda: f"session {guid()} closed", lambda: f"uuid: {guid().upper()}"],
        "cve": [lambda: f"patch for CVE-2023-{digits(5)}", lambda: f"CWE-{digits(2)}: injection, T1{digits(3)}.001"],
        "version": [lambda: f"upgrade to 10.{digits(2)}.{digits(1)}", lambda: f"nginx/1.{digits(2)}.{digits(1)}", lambda: f"build 10.0.19045.{digits(4)}"],
        "time": [lambda: f"at 2023-1{rng.randint(0, 2)}-0{rng.randint(1, 9)} 23:59:{rng.randint(10, 59)},{digits(3)}", lambda: f"exp: 17{digits(8)}"],
        "base64": [lambda: f"payload={base64.b64encode(rng.randbytes(72)).decode()}", lambda: f"cert: MII{pick(rng, ALNUM + '+/', 120)}"],
        "hash": [lambda: f"- {hexes(64)}", lambda: f"file hash {hexes(32)} (malicious)", lambda: f"SHA-1: {hexes(40).upper()}"],
        "public-ip": [lambda: f"scan from 141.98.{digits(2)}.7", lambda: f"185[.]220[.]101[.]{digits(2)}"],
        "domain": [lambda: f"beacon to cdn{digits(3)}.azurefd.net", lambda: f"phish-{hexes(4)}.xyz registered"],
        "placeholder": [lambda: "password: {{ password }}", lambda: "DB_PASS=$DB_PASS", lambda: "secret_key: <insert here>", lambda: "token: \"...\"", lambda: "mysql -u root -p$PASS"],
        "code": [lambda: "return self._password", lambda: "password = input('Password: ')", lambda: "token = parser.next_token()", lambda: "if (password === confirm) {", lambda: "access_key = config.access_key", lambda: "password: bytes | None", lambda: "secrets.compare_digest(a, b)"],
        "prose": [lambda: "The token expires after an hour.", lambda: "Choose a strong password: length matters.", lambda: "Password policy: 14 characters", lambda: "They steal tokens and keys.", lambda: "The password was reused elsewhere.", lambda: "secret: a thing kept hidden"],
        "phone-like": [lambda: f"invoice 2024-{digits(6)}", lambda: f"lat +{digits(2)}.{digits(5)}", lambda: f"rows {digits(3)},{digits(3)}"],
        "bad-card": [lambda: f"imei 99{digits(13)}", lambda: f"span_id={digits(19)}1"],
        "mac-like": [lambda: f"pubkey {':'.join(hexes(2) for _ in range(32))}", lambda: f"{hexes(2)}:{hexes(2)}:{hexes(2)}"],
        "registry": [lambda: f"HKLM\\SAM\\{hexes(4)}", lambda: "C:\\Program Files\\x\\y.exe"],
        "local-code": [lambda: "obj.local = 1", lambda: "cat /etc/hosts.local"],
        "at-code": [lambda: "docker pull a/b@sha256:c", lambda: "@dataclass"],
        "home-page": [lambda: "http://c2.ru/home/gate.php", lambda: "POST /v1/users/me"],
        "rfc-range": [lambda: "127.0.0.53", lambda: "fd00::/8 is ULA", lambda: "224.0.0.251"],
    }  # fmt: skip


class Quality(NamedTuple):
    """Values found whole over values planted; finds that touch a value over all finds; both also by kind."""

    recall: float
    precision: float
    recall_of: dict[str, float]
    false_of: Counter[str]
    missed: list[Sample]
    wrong: list[tuple[Sample, str]]


def measure(
    find: Callable[[str], Iterable[tuple[int, int]]], planted: Iterable[Sample], misses: Iterable[Sample]
) -> Quality:
    hits: Counter[str] = Counter()
    planted_of: Counter[str] = Counter()
    false: Counter[str] = Counter()
    missed, wrong, right = [], [], 0
    for sample in (*planted, *misses):
        at = sample.text.find(sample.value) if sample.value else -1
        end = at + len(sample.value)
        spans = list(find(sample.text))
        if sample.value:
            planted_of[sample.kind] += 1
            covered = all(any(a <= i < b for a, b in spans) for i in range(at, end))
            hits[sample.kind] += covered
            if not covered:
                missed.append(sample)
        for a, b in spans:
            if sample.value and a < end and b > at:
                right += 1
            else:
                false[sample.kind] += 1
                wrong.append((sample, sample.text[a:b]))
    total = sum(planted_of.values())
    return Quality(
        recall=sum(hits.values()) / total,
        precision=right / max(1, right + sum(false.values())),
        recall_of={kind: hits[kind] / number for kind, number in planted_of.items()},
        false_of=false,
        missed=missed,
        wrong=wrong,
    )
