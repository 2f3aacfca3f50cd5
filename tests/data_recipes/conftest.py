import pytest

from data_recipes.chat import ChatTemplate
from tests.data_recipes.toy_chat import make_template


@pytest.fixture(scope="session")
def chatml() -> ChatTemplate:
    return make_template("chatml")
