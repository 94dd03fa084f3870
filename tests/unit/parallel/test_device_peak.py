"""Peaks of devices: the right data sheet, and a measurement that means something."""

import torch

from verl_like.parallel.device_peak import data_sheet, device_peak, known_devices, link_bandwidth


def test_longest_matching_name_wins():
    assert data_sheet("NVIDIA H200")[0] == 989e12
    assert data_sheet("NVIDIA H20")[0] == 148e12
    assert data_sheet("NVIDIA A100-SXM4-80GB")[0] == 312e12
    assert data_sheet("Some New Device") is None


def test_a_cpu_is_measured():
    state = torch.get_rng_state()
    peak = device_peak(torch.device("cpu"), torch.float32)
    assert torch.equal(torch.get_rng_state(), state)  # or dropout and samplers would depend on it
    assert peak.source == "measured"
    assert 1e9 < peak.flops < 1e14 and 1e8 < peak.bandwidth < 1e13
    assert peak.times(3).flops == 3 * peak.flops


def test_links_of_known_gpus():
    assert link_bandwidth("NVIDIA H200") == 450e9 and link_bandwidth("NVIDIA H800") == 200e9
    assert link_bandwidth("NVIDIA L40S") is None
    assert all(data_sheet(name) is not None for name in known_devices())
