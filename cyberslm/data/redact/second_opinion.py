"""The detectors of the detect-secrets package (extra ``data``) as one more rule, off by default.

Only its regular-expression detectors are asked, as plain objects: no global settings, no plugin discovery, no
verification over the network. Its patterns aren't bounded, so a line is shown in windows of 2,000 characters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from cyberslm.data.redact.scan import Scan, Span
from cyberslm.errors import ConfigError

_WINDOW, _OVERLAP = 2000, 500
_MIN_CHARS = 8


def detectors() -> Callable[[Scan], Iterator[Span]]:
    """A rule that asks detect-secrets. Raises ConfigError when the package is missing."""
    try:
        from detect_secrets.plugins import (
            artifactory,
            aws,
            azure_storage_key,
            discord,
            gitlab_token,
            ibm_cos_hmac,
            mailchimp,
            npm,
            openai,
            pypi_token,
            sendgrid,
            softlayer,
            square_oauth,
            stripe,
        )
    except ImportError as error:
        raise ConfigError(
            "detect_secrets: detect-secrets is not installed; pip install 'cyberslm[data]', or set it to false"
        ) from error
    plugins = (
        *(artifactory.ArtifactoryDetector(), aws.AWSKeyDetector(), azure_storage_key.AzureStorageKeyDetector()),
        *(discord.DiscordBotTokenDetector(), gitlab_token.GitLabTokenDetector(), ibm_cos_hmac.IbmCosHmacDetector()),
        *(mailchimp.MailchimpDetector(), npm.NpmDetector(), openai.OpenAIDetector(), pypi_token.PypiTokenDetector()),
        *(sendgrid.SendGridDetector(), softlayer.SoftlayerDetector(), square_oauth.SquareOAuthDetector()),
        stripe.StripeDetector(),
    )

    def find(scan: Scan) -> Iterator[Span]:
        for start, part in _windows(scan.text):
            for plugin in plugins:
                for value in plugin.analyze_string(part):
                    at = part.find(value)
                    if at >= 0 and len(value) >= _MIN_CHARS and not value.endswith("EXAMPLE"):
                        yield Span(start + at, start + at + len(value), "detect-secrets")

    return find


def _windows(text: str) -> Iterator[tuple[int, str]]:
    start = 0
    for line in text.splitlines(keepends=True):
        for at in range(0, max(1, len(line) - _OVERLAP), _WINDOW - _OVERLAP):
            yield start + at, line[at : at + _WINDOW]
        start += len(line)
