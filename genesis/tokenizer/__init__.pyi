"""What `genesis.tokenizer` offers, by module; a name's module is imported when the name is first used."""

from .agreement import choose_encoder as choose_encoder
from .engines import EncodedBatch as EncodedBatch
from .engines import EncoderSpec as EncoderSpec
from .engines import Engine as Engine
from .engines import GigatokenEngine as GigatokenEngine
from .engines import HuggingFaceEngine as HuggingFaceEngine
from .engines import TiktokenEngine as TiktokenEngine
from .engines import make_engine as make_engine
from .export import export_tokenizer as export_tokenizer
from .export import hf_tokenizer_config as hf_tokenizer_config
from .export import hf_tokenizer_json as hf_tokenizer_json
from .export import tiktoken_ranks as tiktoken_ranks
from .frozen import FrozenTokenizer as FrozenTokenizer
from .frozen import StoreTokenizer as StoreTokenizer
from .frozen import read_tokenizer as read_tokenizer
from .frozen import refuse_growth as refuse_growth
from .frozen import tokenizer_of as tokenizer_of
from .importing import import_vocabulary as import_vocabulary
from .neuro import NeuroTokenizer as NeuroTokenizer
