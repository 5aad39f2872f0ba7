"""What the tests of the stacks share."""


def relative_error(results, expected):
    """rms of the differences over that of the values, of all tensors together."""

    def norm(tensors):
        return sum(t.double().square().sum() for t in tensors).sqrt().item()

    assert results.keys() == expected.keys()
    differences = [results[name].double() - expected[name].double() for name in expected]
    return norm(differences) / norm(expected.values())
