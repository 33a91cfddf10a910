"""An exported folder onto a hub."""

from pathlib import Path

from huggingface_hub import HfApi

from grt.errors import ConfigError


def push(folder: Path, repo: str) -> str:
    """Upload everything; returns the address. ConfigError where the hub cannot be reached or refuses."""
    try:
        api = HfApi()
        address = api.create_repo(repo, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Written by grt export")
        return str(address)
    except Exception as error:  # no network, no token, no right, no such name: a dozen classes
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".:")
        raise ConfigError(
            f"{repo} cannot be written ({reason}): check its name, the network and `hf auth login`; {folder} is whole."
        ) from None
