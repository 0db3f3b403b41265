"""Build, import, adapt and export pretrained Hugging Face decoders, without transformers."""

from zerojax.hf.adapters.lora import Lora as Lora
from zerojax.hf.adapters.peft import read_peft as read_peft
from zerojax.hf.adapters.rates import lora_plus as lora_plus
from zerojax.hf.attention import attend as attend
from zerojax.hf.base import fingerprint as fingerprint
from zerojax.hf.beside import end_tokens as end_tokens
from zerojax.hf.beside import files_beside as files_beside
from zerojax.hf.config import DecoderConfig as DecoderConfig
from zerojax.hf.config import Family as Family
from zerojax.hf.decoder import Block as Block
from zerojax.hf.decoder import Options as Options
from zerojax.hf.decoder import Projection as Projection
from zerojax.hf.exporting import export_hf as export_hf
from zerojax.hf.exporting import export_peft as export_peft
from zerojax.hf.gguf_files.export import check_gguf as check_gguf
from zerojax.hf.gguf_files.export import export_gguf as export_gguf
from zerojax.hf.heads.scores import classification_loss as classification_loss
from zerojax.hf.heads.scores import reward_loss as reward_loss
from zerojax.hf.importing import import_hf as import_hf
from zerojax.hf.mixtures.config import Mixture as Mixture
from zerojax.hf.model import config_of as config_of
from zerojax.hf.model import model_of as model_of
from zerojax.hf.names import FAMILIES as FAMILIES
from zerojax.hf.names import fused as fused
from zerojax.hf.names import norm_names as norm_names
from zerojax.hf.names import table as table
