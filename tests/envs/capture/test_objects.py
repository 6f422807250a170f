"""Order of the objects in an environment that is captured as a graph of objects."""

from trawl.envs.capture.objects import objects_of


class Landmark:
    pass


class Beacon(Landmark):
    pass


class Agent:
    def __init__(self, goal):
        self.goal = goal


class World:
    def __init__(self, chosen):
        self.places = [Landmark(), Beacon()]
        self.agents = [Agent(self.places[chosen]), Agent(self.places[1 - chosen])]
        self.a_goal = self.places[chosen]
        self.world = self


def test_pointers_do_not_change_the_order():
    for chosen in (0, 1):
        world = World(chosen)
        assert objects_of(world) == [world, *world.agents, *world.places]


def test_an_object_that_is_only_an_attribute_is_found():
    agent = Agent(Landmark())
    assert objects_of(agent) == [agent, agent.goal]
