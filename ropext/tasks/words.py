"""The words that tasks draw names and noise from."""

_WORDS = """
    anchor apple arrow autumn badge barrel basket beacon bell bird blanket boat bottle
    branch bread bridge brush bucket button cabin cable camel candle canvas carpet castle
    chair cherry circle cloud coast coffee collar copper corner cotton cradle crystal
    curtain desert diamond dinner dragon drum eagle engine falcon feather field finger flame
    flower forest fountain fox frost garden garlic gate ginger glass globe glove guitar
    hammer harbor hat helmet hill honey horse island ivory jacket jungle kettle kitchen
    ladder lake lamp lantern lemon letter lion lizard magnet maple marble market meadow
    melon mirror moon mountain museum mushroom needle nest oak ocean olive onion orange
    orchard oven oyster palace panda paper parrot pearl pencil pepper piano picture pillow
    pilot planet pocket pond potato prairie puzzle rabbit radio rain ribbon river road
    rocket roof rose saddle sailor salmon sand scarf school seed shadow sheep ship silver
    snow socket spider spoon spring square stable star station stone storm sugar summer
    sunset table temple thunder tiger tower train tulip tunnel turtle valley velvet village
    violin wagon walnut water wheel whistle willow window winter wolf yarn zebra
"""

NOUNS: tuple[str, ...] = tuple(_WORDS.split())
