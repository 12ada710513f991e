"""Gradient compression with error feedback: codecs by name, residuals, and the compressed sum over a process group."""

from unisono.kvstore.compression.auto import CodecChoice as CodecChoice
from unisono.kvstore.compression.auto import auto_codec as auto_codec
from unisono.kvstore.compression.codec import Codec as Codec
from unisono.kvstore.compression.codec import can_compress_values as can_compress_values
from unisono.kvstore.compression.compressed_sum import CompressedSum as CompressedSum
from unisono.kvstore.compression.compressed_sum import PowerSGD as PowerSGD
from unisono.kvstore.compression.compressed_sum import compressed_sum as compressed_sum
from unisono.kvstore.compression.error_feedback import ErrorFeedback as ErrorFeedback
from unisono.kvstore.compression.registry import COARSE_CODEC_WITH_ADAM as COARSE_CODEC_WITH_ADAM
from unisono.kvstore.compression.registry import codec_is_fixed as codec_is_fixed
from unisono.kvstore.compression.registry import find_codec as find_codec
from unisono.kvstore.compression.registry import no_traffic_to_compress as no_traffic_to_compress
